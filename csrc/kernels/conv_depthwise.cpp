// Depthwise convolutions. See conv.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A thread goes down output lines with a chunk of channels whose weights, as floats, stay in L1. In a line, eight
// neighbouring outputs of a vector of channels are summed in registers, so a weight is loaded once for eight products;
// inputs come from L1, where a line of the kernel has left them. Sums of a few positions then go through the epilogue
// of the GEMM family.
#include "kernels/conv.h"
#include "kernels/epilogue.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kOutputs = 8;                // neighbouring outputs summed at once
constexpr int64_t kStripRows = 2 * kOutputs;   // outputs of a line that go to the epilogue together
constexpr int64_t kMostPanels = 4;             // of 32 channels, in a chunk
constexpr int64_t kWeightBytes = 16 << 10;     // of a chunk, as floats
constexpr int64_t kProductsOfAThread = 32768;  // fewer are not worth waking another thread

template <class T>
float first_float(const T* p) {
  float buffer[kWidth];
  store(buffer, load_first(p, 1));
  return buffer[0];
}

float weight_at(const PackedWeight& w, int64_t channel, int64_t position) {
  const int64_t tile_k = packed_tile_k(w.dtype), group = packed_group(w.dtype);
  const uint8_t* tile = w.panel_data + channel / kPanelColumns * w.panel_bytes + position / tile_k * 2 * kTileBytes +
                        channel % kPanelColumns / kTileColumns * kTileBytes;
  const int64_t index =
      position % tile_k / group * kTileColumns * group + channel % kTileColumns * group + position % group;
  if (w.dtype == DType::f32) return reinterpret_cast<const float*>(tile)[index];
  if (w.dtype == DType::bf16) return first_float(reinterpret_cast<const Bf16*>(tile) + index);
  return first_float(reinterpret_cast<const F16*>(tile) + index);
}

struct None {};  // no rounding of the input

template <class In, class Round>
XOPT_INLINE F load_rounded(const In* p, int64_t count) {
  const F x = load_first(p, count);
  if constexpr (sizeof(Round) == 2) return round_to<Round>(x);
  return x;
}

// Positions [begin, end) of the kernel along one dimension that lie inside, for a kernel that begins at `first`.
struct Inside {
  int64_t begin, end;
  Inside(int64_t first, int64_t kernel, int64_t dilation, int64_t in) {
    begin = first < 0 ? (-first + dilation - 1) / dilation : 0;
    end = minimum(kernel, first >= in ? 0 : (in - first + dilation - 1) / dilation);
  }
};

template <class In, class Round>
class DepthwiseThread {
 public:
  DepthwiseThread(const ConvCall& call, const GemmCall& epilogue_call, EpilogueFn* epilogue, int64_t chunk, float* sums,
                  float* weights)
      : call_(call),
        v_(call.input),
        epilogue_call_(epilogue_call),
        epilogue_(epilogue),
        chunk_(chunk),
        sums_(sums),
        weights_(weights) {}

  void run(int64_t image, int64_t channel, int64_t line) {
    load_weights(channel);
    const int64_t depth = line / v_.out[1], height = line % v_.out[1];
    line_depth_ = depth * v_.stride[0] - v_.padding[0];
    line_height_ = height * v_.stride[1] - v_.padding[1];
    image_ = static_cast<const In*>(v_.data) + image * v_.image_stride;
    for (int64_t w = 0; w < v_.out[2]; w += kStripRows) {
      const int64_t rows = minimum(kStripRows, v_.out[2] - w);
      for (int64_t c = 0; c < columns_; c += kWidth) sum_outputs(w, rows, c);
      EpilogueStrip strip{};
      strip.acc = sums_;
      strip.acc_panel_stride = kStripRows * kPanelColumns;
      strip.row = strip.out_row = (image * v_.out[0] * v_.out[1] + line) * v_.out[2] + w;
      strip.panel = channel / kPanelColumns;
      strip.column = channel;
      strip.columns = columns_;
      epilogue_(epilogue_call_, strip, 0, rows);
    }
  }

 private:
  int64_t positions() const { return v_.kernel[0] * v_.kernel[1] * v_.kernel[2]; }

  void load_weights(int64_t channel) {
    if (channel == channel_) return;
    channel_ = channel;
    columns_ = minimum(chunk_, v_.channels - channel);
    for (int64_t position = 0; position < positions(); ++position) {
      for (int64_t c = 0; c < columns_; ++c) {
        weights_[position * chunk_ + c] = weight_at(call_.weight, channel + c, position);
      }
      for (int64_t c = columns_; c < chunk_; ++c) weights_[position * chunk_ + c] = 0.0F;
    }
  }

  // Outputs [w, w + rows) of the line, for a vector of channels from c of the chunk on.
  void sum_outputs(int64_t w, int64_t rows, int64_t c) {
    const int64_t count = minimum<int64_t>(kWidth, columns_ - c);
    for (int64_t row = 0; row < rows;) {
      const int64_t first = (w + row) * v_.stride[2] - v_.padding[2];
      const int64_t last = first + (kOutputs - 1) * v_.stride[2] + (v_.kernel[2] - 1) * v_.dilation[2];
      if (count == kWidth && row + kOutputs <= rows && first >= 0 && last < v_.in[2]) {
        sum_block<kOutputs>(first, 0, v_.kernel[2], row, c, kWidth);
        row += kOutputs;
      } else {
        const Inside inside(first, v_.kernel[2], v_.dilation[2], v_.in[2]);
        sum_block<1>(first, inside.begin, inside.end, row, c, count);
        ++row;
      }
    }
  }

  // R neighbouring outputs, the first of which has its kernel at `first`: over positions [begin, end) along the width.
  template <int R>
  XOPT_INLINE void sum_block(int64_t first, int64_t begin, int64_t end, int64_t row, int64_t c, int64_t count) {
    const Inside depths(line_depth_, v_.kernel[0], v_.dilation[0], v_.in[0]);
    const Inside heights(line_height_, v_.kernel[1], v_.dilation[1], v_.in[1]);
    const int64_t step = v_.stride[2] * v_.in_stride[2], position_step = v_.dilation[2] * v_.in_stride[2];
    F acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = set1(0.0F);
    for (int64_t d = depths.begin; d < depths.end; ++d) {
      for (int64_t h = heights.begin; h < heights.end; ++h) {
        const In* x = image_ + (line_depth_ + d * v_.dilation[0]) * v_.in_stride[0] +
                      (line_height_ + h * v_.dilation[1]) * v_.in_stride[1] + first * v_.in_stride[2] + channel_ + c +
                      begin * position_step;
        const float* weights = weights_ + ((d * v_.kernel[1] + h) * v_.kernel[2] + begin) * chunk_ + c;
        for (int64_t position = begin; position < end; ++position) {
          const F weight = load(weights);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r] = fma(load_rounded<In, Round>(x + r * step, count), weight, acc[r]);
          x += position_step;
          weights += chunk_;
        }
      }
    }
    float* sums = sums_ + c / kPanelColumns * kStripRows * kPanelColumns + row * kPanelColumns + c % kPanelColumns;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns, acc[r]);
  }

  const ConvCall& call_;
  const PatchesView& v_;
  const GemmCall& epilogue_call_;
  EpilogueFn* epilogue_;
  const int64_t chunk_;
  float *sums_, *weights_;
  int64_t channel_ = -1, columns_ = 0;
  int64_t line_depth_ = 0, line_height_ = 0;
  const In* image_ = nullptr;
};

template <class In, class Round>
void depthwise_of(const ConvCall& call) {
  static Kernel<SelectEpilogueFn> select("epilogue", "f32");
  const PatchesView& v = call.input;
  const GemmCall gemm{call.images * output_positions(v), {}, call.weight, call.epilogue};
  EpilogueFn* epilogue = nullptr;
  select(gemm, &epilogue);
  const int64_t positions = v.kernel[0] * v.kernel[1] * v.kernel[2];
  const int64_t fitting = kWeightBytes / maximum<int64_t>(1, positions * kPanelColumns * 4);
  const int64_t chunk = minimum(kMostPanels, maximum<int64_t>(1, fitting)) * kPanelColumns;
  const int64_t chunks = (v.channels + chunk - 1) / chunk, lines = v.out[0] * v.out[1];
  const int64_t parts = call.images * chunks * lines;
  const int64_t wanted = gemm.m * v.channels * positions / kProductsOfAThread + 1;
  const int64_t threads = minimum(minimum<int64_t>(max_threads(), parts), wanted);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    const Scratch sums(static_cast<size_t>(chunk * kStripRows * 4));
    const Scratch weights(static_cast<size_t>(positions * chunk * 4));
    DepthwiseThread<In, Round> part(call, gemm, epilogue, chunk, sums.as<float>(), weights.as<float>());
    for (int64_t i = parts * thread / count; i < parts * (thread + 1) / count; ++i) {
      part.run(i / (chunks * lines), i / lines % chunks * chunk, i % lines);
    }
  });
}

template <class In>
void depthwise_from(const ConvCall& call) {
  if (call.weight.dtype == call.input.dtype || call.weight.dtype == DType::f32) return depthwise_of<In, None>(call);
  return call.weight.dtype == DType::bf16 ? depthwise_of<In, Bf16>(call) : depthwise_of<In, F16>(call);
}

void conv_depthwise(const ConvCall& call) {
  if (call.input.dtype == DType::f32) return depthwise_from<float>(call);
  return call.input.dtype == DType::bf16 ? depthwise_from<Bf16>(call) : depthwise_from<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(conv_depthwise, f32, conv_depthwise);

}  // namespace xopt::XOPT_ISA
