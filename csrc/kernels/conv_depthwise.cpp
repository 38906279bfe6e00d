// Depthwise convolutions, and those of narrow groups. See conv.h.
// isa: scalar avx2 avx512 avx512_bf16 amx
//
// A thread goes down output lines with a chunk of channels so narrow that the input lines under the kernel stay in L1: each
// serves all output lines that it lies under, and in the order of memory would come from L2 for each of them. A line's
// outputs are summed eight at a time in registers (depthwise_sums.h), where simple epilogues are done as well; for others,
// sums of a few positions go through the epilogue of the GEMM family. Input lines are read where they are, unless they are
// rounded first or their last channels fill no vector: then each is copied once. int8 is copied to 32-bit integers, from
// which the zero points are taken on their way.
#include <type_traits>

#include "kernels/column_values.h"
#include "kernels/conv.h"
#include "kernels/depthwise_halves.h"
#include "kernels/narrow_sums.h"
#include "kernels/spread_weights.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "runtime/shared_parts.h"
#include "tiles/vector.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kStripRows = 2 * kOutputs;   // outputs of a line that go to the epilogue together, unless tuned
constexpr int64_t kChunkBytes = 48 << 10;      // of a chunk's weights and the lines under the kernel
constexpr int64_t kProductsOfAThread = 32768;  // fewer are not worth waking another thread

struct None {};  // in place of a dtype: the input is not rounded

// `count` channels of a pixel into a copied line. What the last vector has beyond them goes into no output.
template <class Round, class In, class Line>
XOPT_INLINE void copy_pixel(const In* x, int64_t count, int32_t zero_point, Line* to) {
  if constexpr (std::is_same_v<Line, int32_t>) {
    for (int64_t c = 0; c < count; ++c) to[c] = x[c] - zero_point;
  } else if constexpr (std::is_same_v<Line, In> && std::is_same_v<Round, None>) {
    copy_bytes(x, count * static_cast<int64_t>(sizeof(In)), to);
  } else {
    convert_run<Round>(x, count, to);
  }
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
  DepthwisePlan(const ConvCall& call, int64_t line_value_bytes)
      : groups(maximum<int64_t>(1, call.group_in), maximum<int64_t>(1, call.group_out), multiplies_pairs(call)),
        columns(call.products * call.product_columns) {
    const PatchesView& v = call.input;
    if (call.tuning.chunk_rows == TunedRows::half) strip_rows = kStripRows / 2;
    if (call.tuning.chunk_rows == TunedRows::twice) strip_rows = kStripRows * 2;
    taps = v.kernel[0] * v.kernel[1] * v.kernel[2] * groups.steps;
    slots = v.kernel[0] * v.kernel[1];
    const int64_t bytes_of_channel =
        slots * v.in[2] * line_value_bytes * groups.in / groups.out + taps * static_cast<int64_t>(sizeof(float));
    const int64_t fitting = kChunkBytes / (kPanelColumns * bytes_of_channel);
    int64_t panels = minimum(kMostStripPanels, maximum<int64_t>(1, fitting));
    // Equal chunks: a small last one costs as much beside its products as a large one.
    const int64_t all = ceil_div(columns, kPanelColumns);
    panels = ceil_div(all, ceil_div(all, panels));
    if (call.tuning.chunk_panels > 0) panels = minimum<int64_t>(call.tuning.chunk_panels, kMostStripPanels);
    chunk = panels * kPanelColumns;
    pitch = chunk + kTileColumns;  // an odd number of cache lines, so that pixels do not fall into the same sets of L1
  }

  GroupLanes groups;    // of one channel, if not narrow
  int64_t columns;      // outputs' channels
  int64_t taps, slots;  // what an output is a sum of, and lines of the kernel
  int64_t strip_rows = kStripRows;
  int64_t chunk, pitch;  // channels of a chunk, and elements from a pixel of a copied line to the next
};

// Line: what lines are read as, in the input itself where that is what it holds.
template <class In, class Round, class Line>
class DepthwiseThread {
  using Value = ValueOf<Line>;
  static constexpr bool kCouldReadInput = std::is_same_v<In, Line> && std::is_same_v<Round, None>;
  static constexpr bool kCouldBeNarrow = kCouldReadInput && kTakesNarrow<Line>;

 public:
  // Whether lines and weights are read where they are, so that a piece has nothing to copy before it begins.
  static bool reads_in_place(const ConvCall& call) { return !copies_lines(call) && has_float_tiles(call); }

  DepthwiseThread(const ConvCall& call, const GemmCall& epilogue_call, EpilogueFn* epilogue, const DepthwisePlan& plan)
      : call_(call),
        v_(call.input),
        epilogue_call_(epilogue_call),
        epilogue_(epilogue),
        plan_(plan),
        finishes_(finishes_in_registers<Line>(call.epilogue)),
        folds_(finishes_ && kFolds<Line>),
        halves_(outputs_in_halves()),
        outputs_(select_sums()),
        sums_(static_cast<size_t>(finishes_ ? 0 : plan.chunk * plan.strip_rows) * sizeof(Value)),
        weights_(static_cast<size_t>(plan.taps * plan.chunk) * sizeof(Value)),
        starts_(static_cast<size_t>(folds_ ? plan.chunk : 0) * sizeof(float)),
        copies_(static_cast<size_t>(copies_lines(call) ? plan.slots * v_.in[2] * plan.pitch : 0) * sizeof(Line)),
        held_(static_cast<size_t>(plan.slots) * sizeof(int64_t)),
        lines_(static_cast<size_t>(plan.slots) * sizeof(KernelLine<Line>)) {}

  void run(int64_t image, int64_t channel, int64_t line) {
    if (image != image_ || channel != channel_) begin_chunk(image, channel);
    first_depth_ = line / v_.out[1] * v_.stride[0] - v_.padding[0];
    first_height_ = line % v_.out[1] * v_.stride[1] - v_.padding[1];
    depths_ = Inside(first_depth_, v_.kernel[0], v_.dilation[0], v_.in[0]);
    heights_ = Inside(first_height_, v_.kernel[1], v_.dilation[1], v_.in[1]);
    find_lines();
    const int64_t row = (image * v_.out[0] * v_.out[1] + line) * v_.out[2];
    if (finishes_) return sum_outputs(0, v_.out[2], row);
    for (int64_t w = 0; w < v_.out[2]; w += plan_.strip_rows) {
      const int64_t rows = minimum(plan_.strip_rows, v_.out[2] - w);
      sum_outputs(w, rows, row);
      EpilogueStrip strip = strip_;
      strip.acc = sums_.as<Value>();
      strip.acc_panel_stride = plan_.strip_rows * kPanelColumns;
      strip.row = strip.out_row = row + w;
      epilogue_(epilogue_call_, strip, 0, rows);
    }
  }

 private:
  void begin_chunk(int64_t image, int64_t channel) {
    for (int64_t slot = 0; slot < plan_.slots; ++slot) held_.as<int64_t>()[slot] = -1;
    image_ = image;
    if (channel == channel_) return;
    channel_ = channel;
    columns_ = minimum(plan_.chunk, plan_.columns - channel);
    const int64_t padded = round_up(columns_, kPanelColumns);  // as they are packed, with zeros
    values_.fill(call_.epilogue, false, plan_.columns, channel, padded / kPanelColumns, &strip_);
    strip_.panel = channel / kPanelColumns;
    strip_.column = channel;
    strip_.columns = columns_;
    reads_input_ = kCouldReadInput && (is_narrow() || columns_ % kWidth == 0);
    if (!weights_in_place()) {
      Value* to = weights_.as<Value>();
      for (int64_t c = 0; c < padded; c += kTileColumns, to += plan_.taps * kTileColumns) {
        spread(channel + c, to);
      }
    }
    if (folds_) fold(padded);
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
    const int64_t step = plan_.taps * kTileColumns;
    for (int64_t c = 0; halves_ != nullptr && c + kWidth < columns_; c += kTwoVectors) {
      to_halves(weights_.as<float>() + c * plan_.taps, step, plan_.taps);
      if (folds_) to_halves(starts_.as<float>() + c, kWidth, 1);
    }
#endif
  }

  void spread(int64_t output, Value* to) const {
    if constexpr (kCouldBeNarrow) {
      if (is_narrow()) return spread_narrow(call_, output, plan_.groups.pairs, to);
    }
    spread_weights(call_.weight, output, plan_.taps, to);
  }

  // What sums begin with, and the bias's factor in the weights.
  void fold(int64_t padded) {
    float* starts = starts_.as<float>();
    for (int64_t c = 0; c < padded; c += kWidth) store(starts + c, load(strip_.bias + c));
    if (strip_.scale == nullptr) return;
    float* weights = weights_.as<float>();
    for (int64_t c = 0; c < padded; c += kWidth) {
      const F scale = load(strip_.scale + c);
      float* weight = weights + c / kTileColumns * plan_.taps * kTileColumns + c % kTileColumns;
      for (int64_t p = 0; p < plan_.taps; ++p, weight += kTileColumns) store(weight, mul(load(weight), scale));
    }
  }

  // How 32 channels are summed at a time; nullptr: they are not.
  OutputsFn<Line>* outputs_in_halves() const {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
    if constexpr (std::is_same_v<Line, Bf16>) {
      if (call_.weight.dtype == DType::bf16 && !is_narrow()) return select_halves(v_, finishes_);
    }
#endif
    return nullptr;
  }

  OutputsFn<Line>* select_sums() const {
    if (halves_ != nullptr) return halves_;
    if constexpr (kCouldBeNarrow) {
      if (is_narrow()) return select_narrow<Line>(v_, plan_.groups, finishes_);
    }
    return select_outputs<Line>(v_, finishes_);
  }

  bool is_narrow() const { return call_.group_in > 0; }
  static bool copies_lines(const ConvCall& call) {
    return !kCouldReadInput || (call.group_in == 0 && call.input.channels % kWidth != 0);
  }
  // Floats that are one tile high are what copies would be.
  static bool has_float_tiles(const ConvCall& call) {
    const PackedWeight& w = call.weight;
    return std::is_same_v<Value, float> && w.dtype == DType::f32 && w.k_tiles == 1 && call.group_in == 0;
  }
  bool weights_in_place() const { return !folds_ && has_float_tiles(call_); }
  const Value* weights() const {
    if (!weights_in_place()) return weights_.as<Value>();
    return reinterpret_cast<const Value*>(call_.weight.panel_data + channel_ / kPanelColumns * 2 * kTileBytes);
  }

  // Lines that are needed together never have the same place, and one keeps its place for the next output line unless the
  // kernel is dilated.
  int64_t slot_of(int dim, int64_t place, int64_t position) const {
    return v_.dilation[dim] == 1 ? place % v_.kernel[dim] : position;
  }

  // The lines of the kernel that lie inside, with the input lines under them.
  void find_lines() {
    line_count_ = 0;
    for (int64_t d = depths_.begin; d < depths_.end; ++d) {
      for (int64_t h = heights_.begin; h < heights_.end; ++h) {
        const int64_t depth = first_depth_ + d * v_.dilation[0], height = first_height_ + h * v_.dilation[1];
        const Value* weights =
            this->weights() + (d * v_.kernel[1] + h) * v_.kernel[2] * plan_.groups.steps * kTileColumns;
        lines_.as<KernelLine<Line>>()[line_count_++] = {line_values(depth, height, d, h), weights};
      }
    }
  }

  const Line* line_values(int64_t depth, int64_t height, int64_t d, int64_t h) {
    const In* line = static_cast<const In*>(v_.data) + image_ * v_.image_stride + depth * v_.in_stride[0] +
                     height * v_.in_stride[1] + first_channel();
    if constexpr (kCouldReadInput) {
      if (reads_input_) return line;
    }
    const int64_t slot = slot_of(0, depth, d) * v_.kernel[1] + slot_of(1, height, h);
    Line* copy = copies_.as<Line>() + slot * v_.in[2] * plan_.pitch;
    int64_t& held = held_.as<int64_t>()[slot];
    if (held != depth * v_.in[1] + height) {
      held = depth * v_.in[1] + height;
      Line* to = copy;
      for (int64_t w = 0; w < v_.in[2]; ++w, line += v_.in_stride[2], to += plan_.pitch) {
        copy_pixel<Round>(line, columns_, v_.zero, to);
      }
    }
    return copy;
  }

  // Of the chunk, in the input.
  int64_t first_channel() const { return channel_ / plan_.groups.out * plan_.groups.in; }

  // Some outputs of a line, from w on; `row` is the output's that the line's first is.
  void sum_outputs(int64_t w, int64_t outputs, int64_t row) const {
    OutputsCall<Line> call{};
    call.lines = lines_.as<KernelLine<Line>>();
    call.line_count = line_count_;
    call.first = w * v_.stride[2] - v_.padding[2];
    call.positions = v_.in[2];
    call.pitch = reads_input_ ? v_.in_stride[2] : plan_.pitch;
    call.stride = v_.stride[2];
    call.dilation = v_.dilation[2];
    call.kernel = v_.kernel[2];
    call.weight_step = weights_in_place() ? kTileRows * kTileColumns : plan_.taps * kTileColumns;
    call.starts = starts_.as<float>();
    call.columns = columns_;
    call.groups = &plan_.groups;
    call.channels = call_.products * v_.channels - first_channel();
    call.outputs = outputs;
    call.sums = sums_.as<Value>();
    call.panel_step = plan_.strip_rows * kPanelColumns;
    call.epilogue = &call_.epilogue;
    call.strip = &strip_;
    call.row = row + w;
    outputs_(call);
  }

  const ConvCall& call_;
  const PatchesView& v_;
  const GemmCall& epilogue_call_;
  EpilogueFn* epilogue_;
  ColumnValues values_;    // of the chunk
  EpilogueStrip strip_{};  // what its strips have in common
  const DepthwisePlan& plan_;
  const bool finishes_;            // outputs are finished as they are summed
  const bool folds_;               // and begin with the bias
  OutputsFn<Line>* const halves_;  // nullptr: a vector of channels at a time
  OutputsFn<Line>* const outputs_;
  const Scratch sums_, weights_, starts_, copies_, held_, lines_;
  bool reads_input_ = false;  // and no copies of its lines
  int64_t line_count_ = 0;
  int64_t image_ = -1, channel_ = -1, columns_ = 0;
  int64_t first_depth_ = 0, first_height_ = 0;  // where the kernel begins
  Inside depths_, heights_;
};

template <class In, class Round, class Line>
void depthwise_of(const ConvCall& call) {
  static Kernel<SelectEpilogueFn> select("epilogue", sizeof(In) == 1 ? "s32" : "f32");
  const PatchesView& v = call.input;
  const DepthwisePlan plan(call, sizeof(Line));
  GemmCall gemm{call.images * output_positions(v), {}, call.weight.columns(0, plan.columns), call.epilogue};
  gemm.weight.zero_point = gemm.epilogue.row_zero_point = nullptr;  // their part is not in the sums
  EpilogueFn* epilogue = nullptr;
  select(gemm, &epilogue);
  const int64_t chunks = ceil_div(plan.columns, plan.chunk), lines = v.out[0] * v.out[1];
  const int64_t parts = call.images * chunks * lines;
  const int64_t wanted = gemm.m * plan.columns * plan.taps / kProductsOfAThread + 1;
  const int64_t most = minimum<int64_t>(max_threads(), parts);
  const int64_t threads = minimum(most, call.tuning.grid_rows > 0 ? call.tuning.grid_rows : wanted);
  // Where lines come out even, threads take all chunks of some lines: so do the layers before and behind with their rows,
  // and a thread finds what it reads in its own L2 (96 channels of 56 x 56 under 7 x 7 on two cores: 1.2 times as fast).
  // Of few lines, each would copy most of its input lines for itself.
  const int64_t items = call.images * lines, most_lines = ceil_div(items, threads);
  const bool by_lines = most_lines * threads * 8 <= items * 9 && most_lines >= 2 * v.kernel[1];
  const int64_t least_lines = (DepthwiseThread<In, Round, Line>::reads_in_place(call) ? 1 : 4) * v.kernel[1];
  const int64_t units = by_lines ? items : parts, least = maximum(units / (8 * threads), least_lines);
  SharedParts shared(threads, least);
  shared.deal(units);
  parallel_for_some(static_cast<int>(threads), [&](int thread, int count) {
    DepthwiseThread<In, Round, Line> part(call, gemm, epilogue, plan);
    shared.each(thread, count, [&](int64_t, int64_t begin, int64_t end) {
      if (!by_lines) {
        for (int64_t i = begin; i < end; ++i)
          part.run(i / (chunks * lines), i / lines % chunks * plan.chunk, i % lines);
        return;
      }
      while (begin < end) {
        const int64_t image = begin / lines, last = minimum(end, (image + 1) * lines);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          for (int64_t i = begin; i < last; ++i) part.run(image, chunk * plan.chunk, i % lines);
        }
        begin = last;
      }
    });
  });
}

template <class In>
void depthwise_from(const ConvCall& call) {
  if (call.weight.dtype == call.input.dtype || call.weight.dtype == DType::f32) return depthwise_of<In, None, In>(call);
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
