// Elementary functions and activations on vectors, written once in the vocabulary of vector.h.
//
// Absolute errors are under 1e-6 (relative ones under 1e-6 for exp); infinities and NaN come out as in torch.
#pragma once

#include "tiles/normal_table.h"
#include "tiles/types.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// e^x for x of -87 to 88.37, in which no step makes a denormal, whose handling by microcode would cost more than the
// whole function. Several vectors go through it side by side: alone, each step waits for the one before.
template <int64_t N>
XOPT_INLINE void exp_inside(F (&x)[N]) {
  F n[N], r[N], p[N];
#pragma GCC unroll 4
  for (int64_t v = 0; v < N; ++v) n[v] = round_even(mul(x[v], set1(1.44269504F)));
#pragma GCC unroll 4
  for (int64_t v = 0; v < N; ++v) {
    r[v] = fma(n[v], set1(-0.693359375F), x[v]);  // ln 2 in two parts, the first exact in few bits
    r[v] = fma(n[v], set1(2.12194440e-4F), r[v]);
    p[v] = set1(1.38145394e-3F);
  }
  // Of this degree the closest polynomial with e^r's first two terms, within 3e-9 of it: Taylor's is 1.2e-7 away.
  constexpr float kLower[] = {8.36874545e-3F, 4.1668389e-2F, 1.66665211e-1F, 0.49999994F, 1.0F, 1.0F};
#pragma GCC unroll 6
  for (const float c : kLower) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < N; ++v) p[v] = fma(p[v], r[v], set1(c));
  }
#pragma GCC unroll 4
  for (int64_t v = 0; v < N; ++v) x[v] = scale_exponent(p[v], n[v]);
}

XOPT_INLINE F exp_inside(F x) {
  F one[1] = {x};
  exp_inside(one);
  return one[0];
}

// Flushes to zero below, and overflows above.
XOPT_INLINE F exp(F x) {
  constexpr float kLargest = 88.37F, kSmallest = -87.0F;
  const F inside = min(set1(kLargest), max(set1(kSmallest), x));  // keeps NaN: it is the second operand
  const F y = select_less(set1(kLargest), x, set1(__builtin_inff()), exp_inside(inside));
  return select_less(x, set1(kSmallest), set1(0.0F), y);
}

// Rough: for what becomes bf16, whose rounding is ten times the error (7.5e-5 of an exp and 6e-5 of a reciprocal). It takes
// two thirds of the instructions, and no division, which takes as long as them.
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// 1 + e^x, an infinity where that is too large: the exponent overflows by itself. What e^x comes to where it is tiny makes
// no difference.
template <bool Rough>
XOPT_INLINE F one_and_exp(F x) {
  if constexpr (!Rough) return add(set1(1.0F), exp_inside(min(set1(89.0F), max(set1(-87.0F), x))));
  const F power = min(set1(129.0F), max(set1(-125.0F), mul(x, set1(1.44269504F)))), rest = fraction(power);
  F p = set1(7.801783e-2F);
  p = fma(p, rest, set1(2.2607538e-1F));
  p = fma(p, rest, set1(6.9583106e-1F));
  p = fma(p, rest, set1(9.9992537e-1F));
  return add(set1(1.0F), scale_by_floor(p, power));
}
template <bool Rough>
XOPT_INLINE F quotient(F a, F b) {
  return Rough ? mul(a, _mm512_rcp14_ps(b)) : div(a, b);
}
#else
template <bool>
XOPT_INLINE F one_and_exp(F x) {
  return add(set1(1.0F), exp(x));
}
template <bool>
XOPT_INLINE F quotient(F a, F b) {
  return div(a, b);
}
#endif

XOPT_INLINE F negative(F x) { return sub(set1(0.0F), x); }

// log(1 + e^x): of 1 + t the logarithm is 2 atanh(t / (2 + t)), whose series ends soon for t of at most 1.
XOPT_INLINE F softplus(F x) {
  const F t = exp(negative(abs(x))), s = div(t, add(set1(2.0F), t)), square = mul(s, s);
  F p = set1(1.0F / 13.0F);
  constexpr float kLower[] = {1.0F / 11.0F, 1.0F / 9.0F, 1.0F / 7.0F, 0.2F, 1.0F / 3.0F, 1.0F};
#pragma GCC unroll 6
  for (const float c : kLower) p = fma(p, square, set1(c));
  return add(max(set1(0.0F), x), mul(add(s, s), p));
}

template <bool Rough = false>
XOPT_INLINE F sigmoid(F x) {
  return quotient<Rough>(set1(1.0F), one_and_exp<Rough>(negative(x)));
}

// tanh(x) of magnitudes below 0.25, where the quotient of exponentials cancels: an odd polynomial, within 3e-9.
XOPT_INLINE F small_tanh(F magnitude) {
  const F s = mul(magnitude, magnitude);
  F p = set1(-5.14330454e-2F);
  p = fma(p, s, set1(1.33242622e-1F));
  p = fma(p, s, set1(-3.33332419e-1F));
  return fma(mul(p, s), magnitude, magnitude);
}

XOPT_INLINE F tanh(F x) {
  const F magnitude = abs(x);
  const F e = exp(mul(magnitude, set1(-2.0F)));
  const F large = div(sub(set1(1.0F), e), add(set1(1.0F), e));
  return copy_sign(select_less(magnitude, set1(0.25F), small_tanh(magnitude), large), x);
}

// The standard normal distribution minus a half, of |x|: half of erf(|x| / sqrt(2)). Exactly a half from 16/3 on, so that
// the gelu of an infinity is what torch makes of it.
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// By table: 15 instructions, a third of what exp and a division cost.
XOPT_INLINE F look_up(const float* table, __m512i index) {
  return _mm512_permutex2var_ps(_mm512_load_ps(table), index, _mm512_load_ps(table + 16));
}
XOPT_INLINE F half_erf_of_magnitude(F magnitude) {
  const F position = min(set1(31.999998F), mul(magnitude, set1(6.0F)));  // keeps NaN
  const __m512i index = _mm512_cvttps_epi32(position);
  const F t = sub(position, _mm512_cvtepi32_ps(index));
  F p = look_up(kNormalC3, index);
  p = fma(p, t, look_up(kNormalC2, index));
  p = fma(p, t, look_up(kNormalC1, index));
  p = fma(p, t, look_up(kNormalC0, index));
  return select_less(set1(16.0F / 3.0F), magnitude, set1(0.5F), p);
}
#else
// erf(z) = 1 - t (a1 + t (a2 + ...)) exp(-z^2), t = 1 / (1 + p z): Abramowitz and Stegun 7.1.26.
XOPT_INLINE F half_erf_of_magnitude(F magnitude) {
  const F z = mul(magnitude, set1(0.70710678F));
  const F t = div(set1(1.0F), fma(z, set1(0.3275911F), set1(1.0F)));
  F p = set1(1.061405429F);
  p = fma(p, t, set1(-1.453152027F));
  p = fma(p, t, set1(1.421413741F));
  p = fma(p, t, set1(-0.284496736F));
  p = fma(p, t, set1(0.254829592F));
  const F e = exp(mul(mul(z, z), set1(-1.0F)));
  return mul(set1(0.5F), sub(set1(1.0F), mul(mul(p, t), e)));
}
#endif

XOPT_INLINE F gelu_erf(F x) { return mul(x, add(set1(0.5F), copy_sign(half_erf_of_magnitude(abs(x)), x))); }

// x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the same as 0.5 x (1 + tanh(...)).
template <bool Rough = false>
XOPT_INLINE F gelu_tanh(F x) {
  const F s = mul(x, x);
  const F inner = mul(x, fma(s, set1(-2.0F * 0.79788456F * 0.044715F), set1(-2.0F * 0.79788456F)));
  return quotient<Rough>(x, one_and_exp<Rough>(inner));
}

XOPT_INLINE F hardsigmoid(F x) {
  const F y = fma(x, set1(1.0F / 6.0F), set1(0.5F));
  return min(set1(1.0F), max(set1(0.0F), y));
}

template <Activation A, bool Rough = false>
XOPT_INLINE F activate(F x, F alpha, F beta) {
  if constexpr (A == Activation::relu) return max(set1(0.0F), x);
  if constexpr (A == Activation::gelu_erf) return gelu_erf(x);
  if constexpr (A == Activation::gelu_tanh) return gelu_tanh<Rough>(x);
  if constexpr (A == Activation::silu) return quotient<Rough>(x, one_and_exp<Rough>(negative(x)));
  if constexpr (A == Activation::sigmoid) return sigmoid<Rough>(x);
  if constexpr (A == Activation::tanh) return tanh(x);
  if constexpr (A == Activation::hardswish) return mul(x, hardsigmoid(x));
  if constexpr (A == Activation::hardsigmoid) return hardsigmoid(x);
  if constexpr (A == Activation::quick_gelu) return quotient<Rough>(x, one_and_exp<Rough>(mul(x, set1(-1.702F))));
  if constexpr (A == Activation::leaky_relu) return select_less(x, set1(0.0F), mul(x, alpha), x);
  if constexpr (A == Activation::clamp) return min(beta, max(alpha, x));
  return x;
}

}  // namespace xopt::XOPT_ISA
