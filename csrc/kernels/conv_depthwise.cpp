// Depthwise convolutions. See conv.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A thread goes down output lines with a chunk of channels whose weights, as floats, stay in L1. The input lines under the
// kernel are copied to floats, with their padding, and each copy serves all output lines that it lies under; so what is
// outside needs no look, and a bf16 value is converted once and not once for each position of the kernel. In a line,
// eight neighbouring outputs of a vector of channels are summed in registers: a weight is loaded once for eight products.
// Sums of a few positions then go through the epilogue of the GEMM family. int8 goes the same way in 32-bit integers, from
// which the zero points are taken on their way into the copies.
#include "kernels/column_values.h"
#include "kernels/conv.h"
#include "kernels/epilogue.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kOutputs = 8;               // neighbouring outputs summed at once
constexpr int64_t kStripRows = 2 * kOutputs;  // outputs of a line that go to the epilogue together, unless tuned
constexpr int64_t kMostPanels = 4;            // of 32 channels, in a chunk; tuned, up to kMostStripPanels
static_assert(kMostPanels <= kMostStripPanels);
constexpr int64_t kWeightBytes = 16 << 10;     // of a chunk, as floats
constexpr int64_t kLineBytes = 256 << 10;      // of a chunk's copied lines
constexpr int64_t kProductsOfAThread = 32768;  // fewer are not worth waking another thread

// What lines and weights are copied to and multiplied in: floats, or 32-bit integers.
XOPT_INLINE F load_value(const float* p) { return load(p); }
XOPT_INLINE I load_value(const int32_t* p) { return load_int(p); }
XOPT_INLINE void store_value(float* p, F x) { store(p, x); }
XOPT_INLINE void store_value(int32_t* p, I x) { store_int(p, x); }
XOPT_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
XOPT_INLINE I multiply_add(I a, I b, I c) { return add_int(mul_int(a, b), c); }

template <class Value>
struct ValueVector {
  using Type = F;
  static XOPT_INLINE F zero() { return set1(0.0F); }
};
template <>
struct ValueVector<int32_t> {
  using Type = I;
  static XOPT_INLINE I zero() { return set1_int(0); }
};

// The weights of 16 channels, a tile's, at one position: a row of the tile, in which some positions lie side by side.
const uint8_t* tile_row(const PackedWeight& w, int64_t channel, int64_t position) {
  const int64_t tile_k = packed_tile_k(w.dtype), group = packed_group(w.dtype);
  return w.panel_data + channel / kPanelColumns * w.panel_bytes + position / tile_k * 2 * kTileBytes +
         channel % kPanelColumns / kTileColumns * kTileBytes + position % tile_k / group * 64;
}

void tile_weights(const PackedWeight& w, int64_t channel, int64_t position, int32_t* to) {
  const auto* row = reinterpret_cast<const int8_t*>(tile_row(w, channel, position));
  const int64_t group = packed_group(w.dtype);
  for (int64_t i = 0; i < kTileColumns; ++i) {
    to[i] = row[group * i + position % group] - (w.zero_point != nullptr ? w.zero_point[channel + i] : 0);
  }
}

void tile_weights(const PackedWeight& w, int64_t channel, int64_t position, float* to) {
  const uint8_t* row = tile_row(w, channel, position);
  if (w.dtype == DType::f32) {
    __builtin_memcpy(to, row, kTileColumns * sizeof(float));
    return;
  }
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

struct None {};  // in place of a dtype: the input is not rounded

template <class In, class Round>
XOPT_INLINE F load_rounded(const In* p, int64_t count) {
  const F x = load_first(p, count);
  if constexpr (sizeof(Round) == 2) return round_to<Round>(x);
  return x;
}

// `count` channels of a pixel into a copied line. What the last vector has beyond them goes into no output.
template <class Round, class In>
XOPT_INLINE void copy_pixel(const In* x, int64_t count, int32_t, float* to) {
  int64_t c = 0;
  for (; c + kWidth <= count; c += kWidth) store(to + c, load_rounded<In, Round>(x + c, kWidth));
  if (c < count) store(to + c, load_rounded<In, Round>(x + c, count - c));
}
template <class Round, class In>
XOPT_INLINE void copy_pixel(const In* x, int64_t count, int32_t zero_point, int32_t* to) {
  for (int64_t c = 0; c < count; ++c) to[c] = x[c] - zero_point;
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

// Sizes of a thread's scratch.
struct DepthwisePlan {
  explicit DepthwisePlan(const ConvCall& call) {
    const PatchesView& v = call.input;
    if (call.tuning.chunk_rows == TunedRows::half) strip_rows = kStripRows / 2;
    if (call.tuning.chunk_rows == TunedRows::twice) strip_rows = kStripRows * 2;
    positions = v.kernel[0] * v.kernel[1] * v.kernel[2];
    slots = v.kernel[0] * v.kernel[1];
    // What eight outputs at a time read: the last ones of a strip overlap those before them or, in a strip that has less
    // than eight, end behind the line.
    const int64_t last_strip = v.out[2] % strip_rows;
    const int64_t outputs = last_strip == 0 ? v.out[2] : v.out[2] - last_strip + maximum(last_strip, kOutputs);
    width = (outputs - 1) * v.stride[2] + v.dilation[2] * (v.kernel[2] - 1) + 1;
    const int64_t panel_bytes = kPanelColumns * static_cast<int64_t>(sizeof(float));
    const int64_t fitting =
        minimum(kWeightBytes / (positions * panel_bytes), kLineBytes / (slots * width * panel_bytes));
    int64_t panels = minimum(kMostPanels, maximum<int64_t>(1, fitting));
    if (call.tuning.chunk_panels > 0) panels = minimum<int64_t>(call.tuning.chunk_panels, kMostStripPanels);
    chunk = panels * kPanelColumns;
    pitch = chunk + kTileColumns;  // an odd number of cache lines, so that pixels do not fall into the same sets of L1
  }
  int64_t positions, slots, width;
  int64_t strip_rows = kStripRows;
  int64_t chunk, pitch;  // channels of a chunk, and elements from a pixel of a copied line to the next
};

template <class In, class Round, class Value>
class DepthwiseThread {
  using Vector = ValueVector<Value>;
  using V = typename Vector::Type;

 public:
  DepthwiseThread(const ConvCall& call, const GemmCall& epilogue_call, EpilogueFn* epilogue, const DepthwisePlan& plan)
      : call_(call),
        v_(call.input),
        epilogue_call_(epilogue_call),
        epilogue_(epilogue),
        plan_(plan),
        sums_(static_cast<size_t>(plan.chunk * plan.strip_rows) * sizeof(Value)),
        weights_(static_cast<size_t>(plan.positions * plan.chunk) * sizeof(Value)),
        lines_(static_cast<size_t>(plan.slots * plan.width * plan.pitch) * sizeof(Value)),
        held_(static_cast<size_t>(plan.slots) * sizeof(int64_t)),
        line_(static_cast<size_t>(plan.slots) * sizeof(Line)) {}

  void run(int64_t image, int64_t channel, int64_t line) {
    if (image != image_ || channel != channel_) begin_chunk(image, channel);
    first_depth_ = line / v_.out[1] * v_.stride[0] - v_.padding[0];
    first_height_ = line % v_.out[1] * v_.stride[1] - v_.padding[1];
    depths_ = Inside(first_depth_, v_.kernel[0], v_.dilation[0], v_.in[0]);
    heights_ = Inside(first_height_, v_.kernel[1], v_.dilation[1], v_.in[1]);
    find_lines();
    for (int64_t w = 0; w < v_.out[2]; w += plan_.strip_rows) {
      const int64_t rows = minimum(plan_.strip_rows, v_.out[2] - w);
      for (int64_t row = 0; row < rows; row += kOutputs) {
        // The last eight overlap those before them, where there are any.
        const int64_t start = maximum<int64_t>(0, minimum(row, rows - kOutputs));
        for (int64_t c = 0; c < columns_; c += kWidth) sum_outputs(w + start, start, c);
      }
      EpilogueStrip strip = strip_;
      strip.acc = sums_.as<Value>();
      strip.acc_panel_stride = plan_.strip_rows * kPanelColumns;
      strip.row = strip.out_row = (image * v_.out[0] * v_.out[1] + line) * v_.out[2] + w;
      strip.panel = channel / kPanelColumns;
      strip.column = channel;
      strip.columns = columns_;
      epilogue_(epilogue_call_, strip, 0, rows);
    }
  }

 private:
  struct Line {
    const Value* copy;
    int64_t weights;  // elements from the first weight of the chunk on
  };

  void begin_chunk(int64_t image, int64_t channel) {
    for (int64_t slot = 0; slot < plan_.slots; ++slot) held_.as<int64_t>()[slot] = -1;
    image_ = image;
    if (channel == channel_) return;
    channel_ = channel;
    columns_ = minimum(plan_.chunk, v_.channels - channel);
    const int64_t padded = round_up(columns_, kPanelColumns);  // as they are packed, with zeros
    values_.fill(call_.epilogue, false, call_.weight.n, channel, padded / kPanelColumns, &strip_);
    for (int64_t position = 0; position < plan_.positions; ++position) {
      for (int64_t c = 0; c < padded; c += kTileColumns) {
        tile_weights(call_.weight, channel + c, position, weights_.as<Value>() + position * plan_.chunk + c);
      }
    }
  }

  // Lines that are needed together never have the same place, and one keeps its place for the next output line unless the
  // kernel is dilated.
  int64_t slot_of(int dim, int64_t place, int64_t position) const {
    return v_.dilation[dim] == 1 ? place % v_.kernel[dim] : position;
  }

  // The lines of the kernel that lie inside, with copies of the input lines under them.
  void find_lines() {
    line_count_ = 0;
    for (int64_t d = depths_.begin; d < depths_.end; ++d) {
      for (int64_t h = heights_.begin; h < heights_.end; ++h) {
        const int64_t depth = first_depth_ + d * v_.dilation[0], height = first_height_ + h * v_.dilation[1];
        const int64_t slot = slot_of(0, depth, d) * v_.kernel[1] + slot_of(1, height, h);
        Value* copy = lines_.as<Value>() + slot * plan_.width * plan_.pitch;
        int64_t& held = held_.as<int64_t>()[slot];
        if (held != depth * v_.in[1] + height) {
          held = depth * v_.in[1] + height;
          copy_line(depth, height, copy);
        }
        line_.as<Line>()[line_count_++] = {copy, (d * v_.kernel[1] + h) * v_.kernel[2] * plan_.chunk};
      }
    }
  }

  void copy_line(int64_t depth, int64_t height, Value* line) const {
    const In* from = static_cast<const In*>(v_.data) + image_ * v_.image_stride + depth * v_.in_stride[0] +
                     height * v_.in_stride[1] + channel_;
    for (int64_t i = 0; i < plan_.width; ++i, line += plan_.pitch) {
      const int64_t w = i - v_.padding[2];
      const bool inside = w >= 0 && w < v_.in[2];
      if (inside) {
        copy_pixel<Round>(from + w * v_.in_stride[2], columns_, v_.zero, line);
      } else {
        for (int64_t c = 0; c < columns_; c += kWidth) store_value(line + c, Vector::zero());
      }
    }
  }

  // Eight outputs of the line from w on, for a vector of channels.
  void sum_outputs(int64_t w, int64_t row, int64_t c) {
    const int64_t step = v_.stride[2] * plan_.pitch, position_step = v_.dilation[2] * plan_.pitch;
    V acc[kOutputs];
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) acc[r] = Vector::zero();
    const Line* lines = line_.as<Line>();
    for (int64_t l = 0; l < line_count_; ++l) {
      const Value* x = lines[l].copy + w * step + c;
      const Value* weights = weights_.as<Value>() + lines[l].weights + c;
      for (int64_t position = 0; position < v_.kernel[2]; ++position) {
        const V weight = load_value(weights);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kOutputs; ++r) acc[r] = multiply_add(load_value(x + r * step), weight, acc[r]);
        x += position_step;
        weights += plan_.chunk;
      }
    }
    Value* sums = sums_.as<Value>() + c / kPanelColumns * plan_.strip_rows * kPanelColumns + row * kPanelColumns +
                  c % kPanelColumns;
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) store_value(sums + r * kPanelColumns, acc[r]);
  }

  const ConvCall& call_;
  const PatchesView& v_;
  const GemmCall& epilogue_call_;
  EpilogueFn* epilogue_;
  ColumnValues values_;    // of the chunk
  EpilogueStrip strip_{};  // what its strips have in common
  const DepthwisePlan& plan_;
  const Scratch sums_, weights_, lines_, held_, line_;
  int64_t line_count_ = 0;
  int64_t image_ = -1, channel_ = -1, columns_ = 0;
  int64_t first_depth_ = 0, first_height_ = 0;  // where the kernel begins
  Inside depths_, heights_;
};

template <class In, class Round, class Value>
void depthwise_of(const ConvCall& call) {
  static Kernel<SelectEpilogueFn> select("epilogue", sizeof(In) == 1 ? "s32" : "f32");
  const PatchesView& v = call.input;
  GemmCall gemm{call.images * output_positions(v), {}, call.weight, call.epilogue};
  gemm.weight.zero_point = gemm.epilogue.row_zero_point = nullptr;  // their part is not in the sums
  EpilogueFn* epilogue = nullptr;
  select(gemm, &epilogue);
  const DepthwisePlan plan(call);
  const int64_t chunks = (v.channels + plan.chunk - 1) / plan.chunk, lines = v.out[0] * v.out[1];
  const int64_t parts = call.images * chunks * lines;
  const int64_t wanted = gemm.m * v.channels * plan.positions / kProductsOfAThread + 1;
  const int64_t most = minimum<int64_t>(max_threads(), parts);
  const int64_t threads = minimum(most, call.tuning.grid_rows > 0 ? call.tuning.grid_rows : wanted);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    DepthwiseThread<In, Round, Value> part(call, gemm, epilogue, plan);
    for (int64_t i = parts * thread / count; i < parts * (thread + 1) / count; ++i) {
      part.run(i / (chunks * lines), i / lines % chunks * plan.chunk, i % lines);
    }
  });
}

template <class In>
void depthwise_from(const ConvCall& call) {
  if (call.weight.dtype == call.input.dtype || call.weight.dtype == DType::f32)
    return depthwise_of<In, None, float>(call);
  return call.weight.dtype == DType::bf16 ? depthwise_of<In, Bf16, float>(call) : depthwise_of<In, F16, float>(call);
}

void conv_depthwise_f32(const ConvCall& call) {
  if (call.input.dtype == DType::f32) return depthwise_from<float>(call);
  return call.input.dtype == DType::bf16 ? depthwise_from<Bf16>(call) : depthwise_from<F16>(call);
}

void conv_depthwise_s8s8(const ConvCall& call) { depthwise_of<int8_t, None, int32_t>(call); }
void conv_depthwise_u8s8(const ConvCall& call) { depthwise_of<uint8_t, None, int32_t>(call); }

}  // namespace

XOPT_REGISTER_KERNEL(conv_depthwise, f32, conv_depthwise_f32);
XOPT_REGISTER_KERNEL(conv_depthwise, s8s8, conv_depthwise_s8s8);
XOPT_REGISTER_KERNEL(conv_depthwise, u8s8, conv_depthwise_u8s8);

}  // namespace xopt::XOPT_ISA
