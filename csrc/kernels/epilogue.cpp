// The epilogues of the GEMM family and the norm over finished rows. See epilogue.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A routine exists for each activation and each way out that is common (f32, bf16; the others share one that looks at
// the dtype for every vector), so the inner loop holds no decision but well predicted ones.
// Rows are done one after the other across all panels of a strip: the output is written in runs of cache lines, few
// pages at a time.
#include "kernels/epilogue.h"

#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

XOPT_INLINE F combine(Binary binary, F x, F other) { return binary == Binary::add ? add(x, other) : mul(x, other); }

enum class Out { f32, bf16, any };

template <Out O>
XOPT_INLINE void store_out(const Epilogue& e, int64_t index, F x, int64_t count) {
  if constexpr (O == Out::f32) return store_first(static_cast<float*>(e.out) + index, x, count);
  if constexpr (O == Out::bf16) return store_first(static_cast<Bf16*>(e.out) + index, x, count);
  if (e.out_dtype == DType::s8 || e.out_dtype == DType::u8) {
    // Rounded before the zero point is added: it is the stored value that rounds to even.
    x = add(round_even(div(x, set1(e.out_scale))), set1(static_cast<float>(e.out_zero_point)));
  }
  store_any(e.out, e.out_dtype, index, x, count);
}

// An accumulator vector as real numbers. `column` counts packed columns from the strip's first panel on.
template <class Acc>
XOPT_INLINE F dequantise(const GemmCall& call, const EpilogueStrip& strip, int64_t row, int64_t column) {
  const int64_t index = column / kPanelColumns * strip.acc_panel_stride + row * kPanelColumns + column % kPanelColumns;
  if constexpr (Acc(0.5) != 0) {  // a float, said without <type_traits>
    return load(static_cast<const float*>(strip.acc) + index);
  } else {
    const Epilogue& e = call.epilogue;
    const PackedWeight& w = call.weight;
    const int64_t packed_column = strip.panel * kPanelColumns + column;
    I acc = load_int(static_cast<const int32_t*>(strip.acc) + index);
    int32_t a_zero = strip.a_offset;
    const int64_t out_row = strip.row + row;
    if (e.row_zero_point != nullptr) a_zero += e.row_zero_point[e.row_zero_point_per_row ? out_row : 0];
    if (a_zero != 0) acc = sub_int(acc, mul_int(set1_int(a_zero), load_int(w.column_sum + packed_column)));
    if (w.zero_point != nullptr) {
      // sum (a - a0)(b - b0) = acc - a0 sum(b) - b0 (sum(a) - k a0), with the a and a0 of before the offset.
      const auto k_a_zero = static_cast<uint32_t>(call.weight.k) * static_cast<uint32_t>(a_zero - strip.a_offset);
      const auto rest = static_cast<int32_t>(static_cast<uint32_t>(strip.row_sums[row]) - k_a_zero);
      acc = sub_int(acc, mul_int(set1_int(rest), load_int(w.zero_point + packed_column)));
    }
    const float row_scale = e.row_scale[e.row_scale_per_row ? out_row : 0];
    return mul(to_float(acc), mul(set1(row_scale), load(w.scale + packed_column)));
  }
}

// What becomes of a sum. `count` columns from `v` of the strip on; a constant one leaves no trace of the tail.
template <Activation A, Out O>
XOPT_INLINE void finish(const Epilogue& e, F x, int64_t column, int64_t other, int64_t out, int64_t count) {
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  if (e.scale.data != nullptr) {
    // A scale alone is rare, and a sum that is not rounded before is the more exact.
    const F bias = e.bias.data == nullptr ? set1(0.0F) : load_any(e.bias.data, e.bias.dtype, column, count);
    x = fma(x, load_any(e.scale.data, e.scale.dtype, column, count), bias);
  } else if (e.bias.data != nullptr) {
    x = add(x, load_any(e.bias.data, e.bias.dtype, column, count));
  }
  if (e.binary == Binary::none) {
    x = activate<A>(x, alpha, beta);
  } else {
    const F y = load_any(e.other, e.other_dtype, other, count);
    if (e.activation_last) {
      x = activate<A>(combine(e.binary, x, y), alpha, beta);
    } else {
      x = combine(e.binary, activate<A>(x, alpha, beta), y);
    }
  }
  store_out<O>(e, out, x, count);
}

// Scale and bias in fp32, or absent, and nothing but an activation after them: by far the most common, so what the loop
// below decides for each vector is decided once here.
bool is_plain(const Epilogue& e) {
  const bool scale = e.scale.data == nullptr || (e.scale.dtype == DType::f32 && e.bias.data != nullptr);
  return scale && (e.bias.data == nullptr || e.bias.dtype == DType::f32) && e.binary == Binary::none;
}

template <Activation A, Out O>
void finish_plain_row(const Epilogue& e, const float* sums, int64_t panel_stride, int64_t column, int64_t out,
                      int64_t count) {
  const auto* scale = static_cast<const float*>(e.scale.data);
  const auto* bias = static_cast<const float*>(e.bias.data);
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  for (int64_t panel = 0; panel < count; panel += kPanelColumns, sums += panel_stride) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kPanelColumns; v += kWidth) {
      F x = load(sums + v);
      const int64_t at = column + panel + v;
      if (scale != nullptr) {
        x = fma(x, load(scale + at), load(bias + at));
      } else if (bias != nullptr) {
        x = add(x, load(bias + at));
      }
      store_out<O>(e, out + panel + v, activate<A>(x, alpha, beta), kWidth);
    }
  }
}

template <class Acc, Activation A, Out O>
void finish_rows(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end) {
  const Epilogue& e = call.epilogue;
  constexpr bool kFloat = Acc(0.5) != 0;
  int64_t plain = 0;  // columns that are done the short way
  if constexpr (kFloat && O != Out::any && kWidth > 1) {
    if (is_plain(e)) plain = strip.columns / kPanelColumns * kPanelColumns;
  }
  const int64_t whole = strip.columns / kWidth * kWidth;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out = (strip.out_row + row) * e.out_row_stride + strip.column;
    const int64_t other = (strip.row + row) * e.other_row_stride + strip.column;
    if constexpr (kFloat && O != Out::any && kWidth > 1) {
      const float* sums = static_cast<const float*>(strip.acc) + row * kPanelColumns;
      finish_plain_row<A, O>(e, sums, strip.acc_panel_stride, strip.column, out, plain);
    }
    for (int64_t v = plain; v < whole; v += kWidth) {
      finish<A, O>(e, dequantise<Acc>(call, strip, row, v), strip.column + v, other + v, out + v, kWidth);
    }
    if (whole == strip.columns) continue;
    const F x = dequantise<Acc>(call, strip, row, whole);
    finish<A, O>(e, x, strip.column + whole, other + whole, out + whole, strip.columns - whole);
  }
}

// act(gate) * up: a panel holds 16 columns of each.
template <class Acc, Activation A, Out O>
void finish_gated_rows(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end) {
  const Epilogue& e = call.epilogue;
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out = (strip.out_row + row) * e.out_row_stride + strip.column;
    for (int64_t v = 0; v < strip.columns; v += kWidth) {
      const int64_t count = strip.columns - v;
      const int64_t packed = v / kTileColumns * kPanelColumns + v % kTileColumns;
      F gate = dequantise<Acc>(call, strip, row, packed);
      F up = dequantise<Acc>(call, strip, row, packed + kTileColumns);
      if (e.bias.data != nullptr) gate = add(gate, load_any(e.bias.data, e.bias.dtype, strip.column + v, count));
      if (e.up_bias.data != nullptr) up = add(up, load_any(e.up_bias.data, e.up_bias.dtype, strip.column + v, count));
      store_out<O>(e, out + v, mul(activate<A>(gate, alpha, beta), up), count);
    }
  }
}

template <class Acc, Activation A>
EpilogueFn* select_out(const GemmCall& call) {
  const bool gated = call.weight.gated;
  switch (call.epilogue.out_dtype) {
    case DType::f32:
      return gated ? finish_gated_rows<Acc, A, Out::f32> : finish_rows<Acc, A, Out::f32>;
    case DType::bf16:
      return gated ? finish_gated_rows<Acc, A, Out::bf16> : finish_rows<Acc, A, Out::bf16>;
    default:
      return gated ? finish_gated_rows<Acc, A, Out::any> : finish_rows<Acc, A, Out::any>;
  }
}

template <class Acc>
void select_epilogue(const GemmCall& call, EpilogueFn** chosen) {
  switch (call.epilogue.activation) {
#define XOPT_ACTIVATION(NAME)                          \
  case Activation::NAME:                               \
    *chosen = select_out<Acc, Activation::NAME>(call); \
    return;
    XOPT_ACTIVATION(none)
    XOPT_ACTIVATION(relu)
    XOPT_ACTIVATION(gelu_erf)
    XOPT_ACTIVATION(gelu_tanh)
    XOPT_ACTIVATION(silu)
    XOPT_ACTIVATION(sigmoid)
    XOPT_ACTIVATION(tanh)
    XOPT_ACTIVATION(hardswish)
    XOPT_ACTIVATION(hardsigmoid)
    XOPT_ACTIVATION(leaky_relu)
    XOPT_ACTIVATION(clamp)
#undef XOPT_ACTIVATION
  }
}

// Mean and 1 / standard deviation in two passes over a row that lies in L1 or L2.
void row_norm(const GemmCall& call, const float* values, int64_t first_row, int64_t begin, int64_t end) {
  const Epilogue& e = call.epilogue;
  const int64_t n = call.weight.n;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = values + row * n;
    float mean = 0.0F;
    if (e.norm == Norm::layer_norm) {
      F sum = set1(0.0F);
      for (int64_t i = 0; i < n; i += kWidth) sum = add(sum, load_first(x + i, n - i));
      mean = reduce_add(sum) / static_cast<float>(n);
    }
    F squares = set1(0.0F);
    const F center = set1(mean);
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const F d = sub(load(x + i), center);
      squares = fma(d, d, squares);
    }
    float square_sum = reduce_add(squares);
    for (; i < n; ++i) square_sum += (x[i] - mean) * (x[i] - mean);
    const F scale = div(set1(1.0F), sqrt(set1(square_sum / static_cast<float>(n) + e.norm_eps)));
    const int64_t out_row = (first_row + row) * e.out_row_stride;
    for (i = 0; i < n; i += kWidth) {
      const F value = load_first(x + i, n - i);
      F y = mul(sub(value, center), scale);
      if (e.norm_weight.data != nullptr) y = mul(y, load_any(e.norm_weight.data, e.norm_weight.dtype, i, n - i));
      if (e.norm_bias.data != nullptr) y = add(y, load_any(e.norm_bias.data, e.norm_bias.dtype, i, n - i));
      store_out<Out::any>(e, out_row + i, y, n - i);
      if (e.sum != nullptr) store_any(e.sum, e.out_dtype, (first_row + row) * n + i, value, n - i);
    }
  }
}

const auto select_f32 = static_cast<SelectEpilogueFn*>(&select_epilogue<float>);
const auto select_s32 = static_cast<SelectEpilogueFn*>(&select_epilogue<int32_t>);

}  // namespace

XOPT_REGISTER_KERNEL(epilogue, f32, *select_f32);
XOPT_REGISTER_KERNEL(epilogue, s32, *select_s32);
XOPT_REGISTER_KERNEL(row_norm, f32, row_norm);

}  // namespace xopt::XOPT_ISA
