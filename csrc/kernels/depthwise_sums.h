// Neighbouring outputs of a line of a depthwise convolution, for some channels, out of lines or copies of them.
//
// Eight outputs at a time are summed in registers, a vector of channels after the other, and a weight is loaded once for
// eight products. Where the kernel is one that most models have (3, 5 or 7 wide, not dilated), so is a value of a line for all
// outputs that it lies under: 10 loads in place of 24 for a line of a 3 x 3 kernel. The core can load as many vectors as it
// can multiply, so that these loads were what took the time.
#pragma once

#include <type_traits>

#include "kernels/conv.h"
#include "kernels/simple_epilogue.h"
#include "tiles/vector.h"

#if XOPT_LEVEL == XOPT_LEVEL_AVX512_BF16 && !defined(XOPT_EMULATE)
#define XOPT_LINES_IN_PAIRS 1
#else
#define XOPT_LINES_IN_PAIRS 0
#endif

namespace xopt::XOPT_ISA {

inline constexpr int64_t kOutputs = 8;

// What a line's values are multiplied as, with weights of the same: floats, or 32-bit integers.
template <class Line>
struct LineValues {
  using Value = float;
  using Vector = F;
  static constexpr DType kDType = std::is_same_v<Line, float>  ? DType::f32
                                  : std::is_same_v<Line, Bf16> ? DType::bf16
                                                               : DType::f16;
  static XOPT_INLINE F zero() { return set1(0.0F); }
};
template <>
struct LineValues<int32_t> {
  using Value = int32_t;
  using Vector = I;
  static XOPT_INLINE I zero() { return set1_int(0); }
};
template <class Line>
using ValueOf = typename LineValues<Line>::Value;

// Whether sums that are finished in registers begin with the bias, and its factor is in the weights. Not where weights are
// read as they are packed (fp32: 2% slower), or have to be bf16, and not where a float's last bits count: each of many
// small products would be rounded to those of a large bias.
template <class Line>
inline constexpr bool kFolds = std::is_same_v<Line, F16> || (std::is_same_v<Line, Bf16> && !XOPT_LINES_IN_PAIRS);

// Whether sums of such lines become output in registers: where outputs are what lines are. A routine for each of the
// other pairs would be half of what the compiler has to do here, and serve nobody.
template <class Line>
bool finishes_in_registers(const Epilogue& e) {
  if constexpr (std::is_same_v<ValueOf<Line>, float>) {
    return e.out_dtype == LineValues<Line>::kDType && is_simple(e, e.out_dtype);
  } else {
    return false;
  }
}

template <class Line>
XOPT_INLINE F load_value(const Line* p) {
  return load(p);
}
XOPT_INLINE I load_value(const int32_t* p) { return load_int(p); }
XOPT_INLINE void store_value(float* p, F x) { store(p, x); }
XOPT_INLINE void store_value(int32_t* p, I x) { store_int(p, x); }
XOPT_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
XOPT_INLINE I multiply_add(I a, I b, I c) { return add_int(mul_int(a, b), c); }
// GCC would let each product load its value by itself.
XOPT_INLINE void load_once(F& x) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  asm("" : "+v"(x));
#else
  asm("" : "+x"(x));
#endif
}

// Where eight outputs begin that hold output w; the last eight overlap those before them, where there are any.
XOPT_INLINE int64_t first_of_eight(int64_t w, int64_t outputs) {
  return maximum<int64_t>(0, minimum(w, outputs - kOutputs));
}

// A line of the kernel, and the input line that lies under it, or its copy.
template <class Line>
struct KernelLine {
  const Line* values;            // of the line's first position
  const ValueOf<Line>* weights;  // of 16 channels at each of the kernel's positions, one after the other
};

class GroupLanes;  // narrow_sums.h

// All distances are in elements.
template <class Line>
struct OutputsCall {
  const KernelLine<Line>* lines;
  int64_t line_count;
  int64_t first;             // the position, maybe outside of the line, where the first output's kernel begins
  int64_t positions;         // of a line; what lies under others is zero
  int64_t pitch;             // from a position of a line to the next
  int64_t stride, dilation;  // in positions
  int64_t kernel;            // positions of a kernel's line
  int64_t weight_step;       // from 16 channels' weights to those of the next
  const float* starts;       // where kFolds: what sums begin with, by channels
  int64_t columns;           // outputs' channels
  const GroupLanes* groups;  // of narrow ones, and how many channels a position has from the first output's group on
  int64_t channels;
  int64_t outputs;
  // Either where sums go, panel by panel, or what they become. Of less than eight outputs, eight have sums.
  ValueOf<Line>* sums;
  int64_t panel_step;
  const Epilogue* epilogue;
  const EpilogueStrip* strip;
  int64_t row;  // of the output, that the first is
};
template <class Line>
using OutputsFn = void(const OutputsCall<Line>& call);

// Positions of a line under eight outputs.
template <int64_t K, int64_t S>
inline constexpr int64_t kPositions = (kOutputs - 1) * S + K;

// Which of the next positions are inside: a bit each.
template <class Line>
XOPT_INLINE uint32_t positions_inside(const OutputsCall<Line>& call, int64_t position, int64_t count) {
  const int64_t begin = minimum(count, maximum<int64_t>(0, -position));
  const int64_t end = maximum(begin, minimum(count, call.positions - position));
  return static_cast<uint32_t>((uint64_t{1} << end) - (uint64_t{1} << begin));
}

// A line's values as they lie, and what a sum becomes by one of them.
struct PlainValues {
  template <class Line>
  XOPT_INLINE auto at(const Line* p) const {
    return load_value(p);
  }
  template <class V>
  static XOPT_INLINE V add(V sum, V value, V weight) {
    return multiply_add(value, weight, sum);
  }
};

// Adds the products of a line of the kernel, K positions and a stride S that are known here, with no dilation. Where
// `Checked`, positions that are not `inside` are left out: a test and a jump for each, where a copy with zeros would be a
// load and a store.
template <int64_t K, int64_t S, bool Checked, class Line, class Values>
XOPT_INLINE void add_line(const Line* x, int64_t pitch, uint32_t inside, const float* weights, const Values& values,
                          F (&acc)[kOutputs]) {
  F weight[K];
#pragma GCC unroll 8
  for (int64_t p = 0; p < K; ++p) weight[p] = load(weights + p * kTileColumns);
#pragma GCC unroll 32
  for (int64_t i = 0; i < kPositions<K, S>; ++i, x += pitch) {
    asm("" : "+r"(x));       // GCC would keep the places of all of them on the stack
    asm("" : "+r"(inside));  // or the answers for all
    if (Checked && (inside >> i & 1) == 0) continue;
    F value = values.at(x);
    load_once(value);
#pragma GCC unroll 8
    for (int64_t p = 0; p < K; ++p) {
      const int64_t r = (i - p) / S;
      if (i >= p && r * S == i - p && r < kOutputs) acc[r] = Values::add(acc[r], value, weight[p]);
    }
  }
}

// Likewise, of any kernel, from a position of the line on.
template <class Line, class Values, class V>
XOPT_INLINE void add_any_line(const OutputsCall<Line>& call, const Line* x, int64_t position,
                              const ValueOf<Line>* weights, const Values& values, V (&acc)[kOutputs]) {
  const int64_t step = call.stride * call.pitch, last = position + (kOutputs - 1) * call.stride;
  for (int64_t p = 0; p < call.kernel; ++p, weights += kTileColumns) {
    const int64_t under = p * call.dilation;
    const Line* at = x + under * call.pitch;
    const V weight = load_value(weights);
    if (position + under >= 0 && last + under < call.positions) {
#pragma GCC unroll 8
      for (int64_t r = 0; r < kOutputs; ++r) acc[r] = Values::add(acc[r], values.at(at + r * step), weight);
      continue;
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) {
      const int64_t place = position + under + r * call.stride;
      if (place >= 0 && place < call.positions) acc[r] = Values::add(acc[r], values.at(at + r * step), weight);
    }
  }
}

// Eight outputs whose kernels begin at `position` and, strides on, behind it.
template <class Line>
struct EightOutputs {
  EightOutputs(const OutputsCall<Line>& call, int64_t output, int64_t count)
      : position(call.first + output * call.stride),
        values(position * call.pitch),
        inside(positions_inside(call, position, count)) {}
  int64_t position, values;  // values: from a line's first position
  uint32_t inside;           // of `count` positions, a bit each
};

XOPT_INLINE void begin_with(F start, F (&acc)[kOutputs]) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r) {
    acc[r] = start;
    load_once(acc[r]);  // GCC would keep the start as well, and sums on the stack for it
  }
}

// What sums of the vector of channels from c on begin with.
template <bool Folds, class Line, class V>
XOPT_INLINE void begin_sums(const OutputsCall<Line>& call, int64_t c, V (&acc)[kOutputs]) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r) acc[r] = LineValues<Line>::zero();
  if constexpr (Folds) begin_with(load(call.starts + c), acc);
}

// Where the weights of the vector of channels from c on are, from a line's first on.
template <class Line>
XOPT_INLINE int64_t weight_of(const OutputsCall<Line>& call, int64_t c) {
  return c / kTileColumns * call.weight_step + c % kTileColumns;
}

// Adds a line of the kernel. K and S: known here, with no dilation; 0: not known.
template <int64_t K, int64_t S, class Line, class Values, class V>
XOPT_INLINE void add_kernel_line(const OutputsCall<Line>& call, const EightOutputs<Line>& outputs, const Line* x,
                                 const ValueOf<Line>* weights, const Values& values, V (&acc)[kOutputs]) {
  if constexpr (K == 0) {
    add_any_line(call, x, outputs.position, weights, values, acc);
  } else if (outputs.inside == (uint64_t{1} << kPositions<K, S>)-1) {
    add_line<K, S, false>(x, call.pitch, 0, weights, values, acc);
  } else {
    add_line<K, S, true>(x, call.pitch, outputs.inside, weights, values, acc);
  }
}

// Their sums for the vector of channels from c on.
template <int64_t K, int64_t S, bool Folds, class Line, class V>
XOPT_INLINE void sum_outputs(const OutputsCall<Line>& call, const EightOutputs<Line>& outputs, int64_t c,
                             V (&acc)[kOutputs]) {
  begin_sums<Folds>(call, c, acc);
  const int64_t x = outputs.values + c, weight = weight_of(call, c);
  const KernelLine<Line>* end = call.lines + call.line_count;
  for (const auto* line = call.lines; line != end; ++line) {
    add_kernel_line<K, S>(call, outputs, line->values + x, line->weights + weight, PlainValues{}, acc);
  }
}

// How outputs are summed: here, each of its own channel.
struct OwnChannels {
  template <int64_t K, int64_t S, bool Folds, class Line, class V>
  static XOPT_INLINE void sum(const OutputsCall<Line>& call, const EightOutputs<Line>& outputs, int64_t c,
                              V (&acc)[kOutputs]) {
    sum_outputs<K, S, Folds>(call, outputs, c, acc);
  }
};

// Sums for an epilogue of its own.
template <class Channels, int64_t K, int64_t S, class Line>
void store_outputs(const OutputsCall<Line>& call) {
  for (int64_t w = 0; w < call.outputs; w += kOutputs) {
    const int64_t first = first_of_eight(w, call.outputs);
    const EightOutputs<Line> outputs(call, first, kPositions<K, S>);
    for (int64_t c = 0; c < call.columns; c += kWidth) {
      typename LineValues<Line>::Vector acc[kOutputs];
      Channels::template sum<K, S, false>(call, outputs, c, acc);
      ValueOf<Line>* sums = call.sums + c / kPanelColumns * call.panel_step + first * kPanelColumns + c % kPanelColumns;
#pragma GCC unroll 8
      for (int64_t r = 0; r < kOutputs; ++r) store_value(sums + r * kPanelColumns, acc[r]);
    }
  }
}

template <class Channels, int64_t K, int64_t S, class Line>
void finish_outputs(const OutputsCall<Line>& call) {
  Finish<Line> finish = finish_of<Line>(*call.epilogue, *call.strip, call.row, call.row, 0);
  Line* const out = finish.out;
  const Line* const other = finish.other;
  for (int64_t w = 0; w < call.outputs; w += kOutputs) {
    const int64_t first = first_of_eight(w, call.outputs);
    const EightOutputs<Line> outputs(call, first, kPositions<K, S>);
    finish.out = out + first * finish.out_stride;
    finish.other = other + first * finish.other_stride;
    for (int64_t c = 0; c < call.columns; c += kWidth) {
      F acc[kOutputs];
      Channels::template sum<K, S, kFolds<Line>>(call, outputs, c, acc);
      if (call.outputs >= kOutputs) {
        finish_rows<!kFolds<Line>>(finish, c, acc);
      } else {
        finish_rows<!kFolds<Line>>(finish, c, acc, call.outputs);
      }
    }
  }
}

template <class Channels, int64_t K, int64_t S, class Line>
OutputsFn<Line>* outputs_fn_of(bool finish) {
  if constexpr (std::is_same_v<ValueOf<Line>, float>) {
    if (finish) return finish_outputs<Channels, K, S, Line>;
  }
  return store_outputs<Channels, K, S, Line>;
}

template <int64_t N>
using Number = std::integral_constant<int64_t, N>;

// known(K, S), as Numbers, of the kernels that most models have, with no dilation; of all others known(0, 0).
template <class Known>
auto select_line([[maybe_unused]] const PatchesView& v, const Known& known) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2  // below, values that are known to lie under several outputs find no registers
  const int64_t kernel = v.dilation[2] == 1 ? v.kernel[2] : 0, stride = v.stride[2];
  if (kernel == 3 && stride == 1) return known(Number<3>{}, Number<1>{});
  if (kernel == 3 && stride == 2) return known(Number<3>{}, Number<2>{});
  if (kernel == 5 && stride == 1) return known(Number<5>{}, Number<1>{});
  if (kernel == 5 && stride == 2) return known(Number<5>{}, Number<2>{});
  if (kernel == 7 && stride == 1) return known(Number<7>{}, Number<1>{});
#endif
  return known(Number<0>{}, Number<0>{});
}

// `finish`: whether sums become output at once, of what finishes_in_registers.
template <class Line>
OutputsFn<Line>* select_outputs(const PatchesView& v, bool finish) {
  if constexpr (std::is_same_v<ValueOf<Line>, float>) {
    return select_line(v, [&](auto k, auto s) { return outputs_fn_of<OwnChannels, k, s, Line>(finish); });
  } else {
    return outputs_fn_of<OwnChannels, 0, 0, Line>(finish);
  }
}

}  // namespace xopt::XOPT_ISA
