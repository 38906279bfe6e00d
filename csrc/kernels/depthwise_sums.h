// Eight neighbouring outputs of a line of a depthwise convolution, for some channels, out of lines or copies of them.
//
// A weight is loaded once for eight products. Where the kernel is one that most models have (3 or 5 wide, not dilated),
// so is a value of a line for all outputs that it lies under: 10 loads in place of 24 for a line of a 3 x 3 kernel. The
// core can load as many vectors as it can multiply, so that these loads were what took the time.
#pragma once

#include "kernels/conv.h"
#include "kernels/simple_epilogue.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kOutputs = 8;

// What lines and weights are copied to and multiplied in: floats, or 32-bit integers.
template <class Value>
struct ValueVector {
  using Type = F;
  static constexpr bool kFloats = true;
  static XOPT_INLINE F zero() { return set1(0.0F); }
};
template <>
struct ValueVector<int32_t> {
  using Type = I;
  static constexpr bool kFloats = false;
  static XOPT_INLINE I zero() { return set1_int(0); }
};
XOPT_INLINE F load_value(const float* p) { return load(p); }
XOPT_INLINE I load_value(const int32_t* p) { return load_int(p); }
XOPT_INLINE void store_value(float* p, F x) { store(p, x); }
XOPT_INLINE void store_value(int32_t* p, I x) { store_int(p, x); }
XOPT_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
XOPT_INLINE I multiply_add(I a, I b, I c) { return add_int(mul_int(a, b), c); }

// A line of the kernel, and the input line that lies under it, or its copy.
template <class Value>
struct KernelLine {
  const Value* values;
  const Value* weights;
};

// All distances are in elements.
template <class Value>
struct OutputsCall {
  const KernelLine<Value>* lines;
  int64_t line_count;
  int64_t first;                // from a line's beginning to what the first output reads first
  int64_t pitch;                // from a position of a line to the next
  int64_t stride, dilation;     // in positions
  int64_t kernel, weight_step;  // positions of a kernel's line, and from one's weights to the next's
  int64_t columns;              // channels
  int64_t outputs;              // that there are of the eight
  // Either where sums go, panel by panel, or what they become.
  Value* sums;
  int64_t panel_step;
  const Epilogue* epilogue;
  const EpilogueStrip* strip;
  int64_t row;  // of the output, that the first is
};
template <class Value>
using OutputsFn = void(const OutputsCall<Value>& call);

// For the vector of channels from c on. K positions and stride S: known here, with no dilation; 0: not known.
template <int64_t K, int64_t S, class Value, class V>
XOPT_INLINE void sum_outputs(const OutputsCall<Value>& call, int64_t c, V (&acc)[kOutputs]) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r) acc[r] = ValueVector<Value>::zero();
  for (int64_t l = 0; l < call.line_count; ++l) {
    const Value* x = call.lines[l].values + call.first + c;
    const Value* weights = call.lines[l].weights + c;
    if constexpr (K > 0) {
      V weight[K];
#pragma GCC unroll 8
      for (int64_t p = 0; p < K; ++p) weight[p] = load_value(weights + p * call.weight_step);
#pragma GCC unroll 32
      for (int64_t i = 0; i < (kOutputs - 1) * S + K; ++i, x += call.pitch) {
        const V value = load_value(x);
#pragma GCC unroll 8
        for (int64_t p = 0; p < K; ++p) {
          const int64_t r = (i - p) / S;
          if (i >= p && r * S == i - p && r < kOutputs) acc[r] = multiply_add(value, weight[p], acc[r]);
        }
      }
    } else {
      const int64_t step = call.stride * call.pitch;
      for (int64_t p = 0; p < call.kernel; ++p, x += call.dilation * call.pitch, weights += call.weight_step) {
        const V weight = load_value(weights);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kOutputs; ++r) acc[r] = multiply_add(load_value(x + r * step), weight, acc[r]);
      }
    }
  }
}

// Sums for an epilogue of its own.
template <int64_t K, int64_t S, class Value>
void store_outputs(const OutputsCall<Value>& call) {
  for (int64_t c = 0; c < call.columns; c += kWidth) {
    typename ValueVector<Value>::Type acc[kOutputs];
    sum_outputs<K, S>(call, c, acc);
    Value* sums = call.sums + c / kPanelColumns * call.panel_step + c % kPanelColumns;
#pragma GCC unroll 8
    for (int64_t r = 0; r < kOutputs; ++r) store_value(sums + r * kPanelColumns, acc[r]);
  }
}

template <int64_t K, int64_t S, class Out>
void finish_outputs(const OutputsCall<float>& call) {
  Finish<Out> finish = finish_of<Out>(*call.epilogue, *call.strip, call.row, call.row, 0);
  for (int64_t c = 0; c < call.columns; c += kWidth) {
    F acc[kOutputs];
    sum_outputs<K, S>(call, c, acc);
    if (call.outputs >= kOutputs) {
      finish_rows(finish, c, acc);
      continue;
    }
    Finish<Out> row = finish;
    for (int64_t r = 0; r < call.outputs; ++r, row.out += row.out_stride, row.other += row.other_stride) {
      F x[1] = {acc[r]};
      finish_rows(row, c, x);
    }
  }
}

template <int64_t K, int64_t S, class Value>
OutputsFn<Value>* outputs_fn_of(const Epilogue& e, bool finish) {
  if constexpr (ValueVector<Value>::kFloats) {
    if (finish && e.out_dtype == DType::f32) return finish_outputs<K, S, float>;
    if (finish && e.out_dtype == DType::bf16) return finish_outputs<K, S, Bf16>;
    if (finish && e.out_dtype == DType::f16) return finish_outputs<K, S, F16>;
  }
  return store_outputs<K, S, Value>;
}

// `finish`: whether sums become output at once; only for epilogues that are simple, and floats.
template <class Value>
OutputsFn<Value>* select_outputs(const PatchesView& v, const Epilogue& e, bool finish) {
  const int64_t kernel = v.dilation[2] == 1 ? v.kernel[2] : 0, stride = v.stride[2];
  if constexpr (ValueVector<Value>::kFloats) {
    if (kernel == 3 && stride == 1) return outputs_fn_of<3, 1, Value>(e, finish);
    if (kernel == 3 && stride == 2) return outputs_fn_of<3, 2, Value>(e, finish);
    if (kernel == 5 && stride == 1) return outputs_fn_of<5, 1, Value>(e, finish);
    if (kernel == 5 && stride == 2) return outputs_fn_of<5, 2, Value>(e, finish);
  }
  return outputs_fn_of<0, 0, Value>(e, finish);
}

}  // namespace xopt::XOPT_ISA
