// Depthwise convolutions. See conv.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A thread goes down output lines with a chunk of channels whose weights, as floats, stay in L1. In a line, eight
// neighbouring outputs of a vector of channels are summed in registers, so a weight is loaded once for eight products;
// inputs come from L1, where a line of the kernel has left them. Outputs whose kernel hangs over the border, and those
// past the end of a line that fill up the eight, read zeros in place of what lies outside. Sums of a few positions then
// go through the epilogue of the GEMM family.
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

// The weights of 16 channels, a tile's, at one position, as floats.
void tile_weights(const PackedWeight& w, int64_t channel, int64_t position, float* to) {
  const int64_t tile_k = packed_tile_k(w.dtype), group = packed_group(w.dtype);
  const uint8_t* row = w.panel_data + channel / kPanelColumns * w.panel_bytes + position / tile_k * 2 * kTileBytes +
                       channel % kPanelColumns / kTileColumns * kTileBytes + position % tile_k / group * 64;
  if (w.dtype == DType::f32) return __builtin_memcpy(to, row, kTileColumns * sizeof(float)), void();
  // Two positions lie side by side.
  uint16_t bits[kTileColumns];
  for (int64_t i = 0; i < kTileColumns; ++i) {
    __builtin_memcpy(bits + i, row + (2 * i + position % 2) * sizeof(uint16_t), sizeof(uint16_t));
  }
  for (int64_t i = 0; i < kTileColumns; i += kWidth) {
    store(to + i, w.dtype == DType::bf16 ? load(reinterpret_cast<const Bf16*>(bits + i))
                                         : load(reinterpret_cast<const F16*>(bits + i)));
  }
}

struct None {};  // no rounding of the input

template <class In, class Round>
XOPT_INLINE F load_rounded(const In* p, int64_t count) {
  const F x = load_first(p, count);
  if constexpr (sizeof(Round) == 2) return round_to<Round>(x);
  return x;
}

// Positions [begin, end) of the kernel along one dimension that lie inside.
struct Inside {
  int64_t begin = 0, end = 0;
  Inside() = default;
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
    const int64_t depth = line / v_.out[1] * v_.stride[0] - v_.padding[0];
    const int64_t height = line % v_.out[1] * v_.stride[1] - v_.padding[1];
    depths_ = Inside(depth, v_.kernel[0], v_.dilation[0], v_.in[0]);
    heights_ = Inside(height, v_.kernel[1], v_.dilation[1], v_.in[1]);
    line_ = static_cast<const In*>(v_.data) + image * v_.image_stride + depth * v_.in_stride[0] +
            height * v_.in_stride[1] + channel;
    for (int64_t w = 0; w < v_.out[2]; w += kStripRows) {
      const int64_t rows = minimum(kStripRows, v_.out[2] - w);
      for (int64_t row = 0; row < rows; row += kOutputs) {
        // The last eight overlap those before them, where there are any.
        const int64_t start = maximum<int64_t>(0, minimum(row, rows - kOutputs));
        sum_outputs(w + start, start, rows < kOutputs);
      }
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
    const int64_t padded = round_up(columns_, kPanelColumns);  // as they are packed, with zeros
    for (int64_t position = 0; position < positions(); ++position) {
      for (int64_t c = 0; c < padded; c += kTileColumns) {
        tile_weights(call_.weight, channel + c, position, weights_ + position * chunk_ + c);
      }
    }
  }

  // Eight outputs from w on, for all channels of the chunk.
  void sum_outputs(int64_t w, int64_t row, bool past_the_end) {
    const int64_t first = w * v_.stride[2] - v_.padding[2];
    const int64_t last = first + (kOutputs - 1) * v_.stride[2] + (v_.kernel[2] - 1) * v_.dilation[2];
    const bool inside = !past_the_end && first >= 0 && last < v_.in[2];
    int64_t c = 0;
    for (; c + kWidth <= columns_; c += kWidth) {
      if (inside) {
        sum_block<true>(first, row, c, kWidth);
      } else {
        sum_block<false>(first, row, c, kWidth);
      }
    }
    if (c < columns_) sum_block<false>(first, row, c, columns_ - c);
  }

  // The kernels of the eight are at `first` and further ones; kInside: none of them hangs over an end of the line.
  template <bool kInside>
  XOPT_INLINE void sum_block(int64_t first, int64_t row, int64_t c, int64_t count) {
    const int64_t step = v_.stride[2] * v_.in_stride[2], position_step = v_.dilation[2] * v_.in_stride[2];
    F acc[kOutputs];
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) acc[r] = set1(0.0F);
    for (int64_t d = depths_.begin; d < depths_.end; ++d) {
      for (int64_t h = heights_.begin; h < heights_.end; ++h) {
        const In* line = line_ + d * v_.dilation[0] * v_.in_stride[0] + h * v_.dilation[1] * v_.in_stride[1] + c;
        const In* x = line + first * v_.in_stride[2];
        const float* weights = weights_ + (d * v_.kernel[1] + h) * v_.kernel[2] * chunk_ + c;
        int64_t place = first;
        for (int64_t position = 0; position < v_.kernel[2]; ++position) {
          const F weight = load(weights);
          if (kInside || (place >= 0 && place + (kOutputs - 1) * v_.stride[2] < v_.in[2])) {
#pragma GCC unroll 8
            for (int64_t r = 0; r < kOutputs; ++r) {
              acc[r] = fma(load_rounded<In, Round>(x + r * step, count), weight, acc[r]);
            }
          } else {
#pragma GCC unroll 8
            for (int64_t r = 0; r < kOutputs; ++r) {
              const int64_t at = place + r * v_.stride[2];
              const In* from = at < 0 || at >= v_.in[2] ? kZeros : x + r * step;
              acc[r] = fma(load_rounded<In, Round>(from, count), weight, acc[r]);
            }
          }
          x += position_step;
          place += v_.dilation[2];
          weights += chunk_;
        }
      }
    }
    float* sums = sums_ + c / kPanelColumns * kStripRows * kPanelColumns + row * kPanelColumns + c % kPanelColumns;
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) store(sums + r * kPanelColumns, acc[r]);
  }

  static constexpr In kZeros[kWidth] = {};

  const ConvCall& call_;
  const PatchesView& v_;
  const GemmCall& epilogue_call_;
  EpilogueFn* epilogue_;
  const int64_t chunk_;
  float *sums_, *weights_;
  int64_t channel_ = -1, columns_ = 0;
  Inside depths_, heights_;
  const In* line_ = nullptr;  // where the kernel of the line's outputs begins, at the left end of the image
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
