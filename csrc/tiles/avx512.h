// The vector vocabulary at level `avx512` and above: 16 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "tiles/halves.h"

namespace xopt::XOPT_ISA {

using F = __m512;
inline constexpr int kWidth = 16;

XOPT_INLINE F set1(float x) { return _mm512_set1_ps(x); }
XOPT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
XOPT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
XOPT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
XOPT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
// 1 / a within an ulp, for a and the result normal: a third of what a division costs.
XOPT_INLINE F reciprocal(F a) {
  const F estimate = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(a, estimate, _mm512_set1_ps(1.0F)), estimate, estimate);
}
XOPT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand if either is NaN. Clamps keep NaN by passing the value second.
XOPT_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
XOPT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
XOPT_INLINE F abs(F a) { return _mm512_abs_ps(a); }
XOPT_INLINE F copy_sign(F magnitude, F sign) {
  // 0xca: the mask chooses bits of the first operand, else of the second.
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7fffffff), _mm512_castps_si512(magnitude),
                                                       _mm512_castps_si512(sign), 0xca));
}
// a < b ? x : y
XOPT_INLINE F select_less(F a, F b, F x, F y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// x * 2^n for n integral.
XOPT_INLINE F scale_exponent(F x, F n) { return _mm512_scalef_ps(x, n); }
XOPT_INLINE F round_even(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// What is above the next lower whole number, and x times 2 to the power of that number.
XOPT_INLINE F fraction(F a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
XOPT_INLINE F scale_by_floor(F x, F n) { return _mm512_scalef_ps(x, n); }
XOPT_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
XOPT_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a); }

XOPT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
XOPT_INLINE F load(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
XOPT_INLINE F load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
XOPT_INLINE F load(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
XOPT_INLINE F load(const Bf16* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
#if XOPT_LEVEL >= XOPT_LEVEL_AMX && !defined(XOPT_EMULATE)
  // Each word above two bytes of zeros: one instruction in place of two, and not on both ports that multiply.
  const __m512i bytes =
      _mm512_set_epi32(0x1f1e0000, 0x1d1c0000, 0x1b1a0000, 0x19180000, 0x17160000, 0x15140000, 0x13120000, 0x11100000,
                       0x0f0e0000, 0x0d0c0000, 0x0b0a0000, 0x09080000, 0x07060000, 0x05040000, 0x03020000, 0x01000000);
  constexpr __mmask64 kUpperHalves = 0xcccccccccccccccc;
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi8(kUpperHalves, bytes, _mm512_castsi256_si512(words)));
#else
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
#endif
}
XOPT_INLINE F load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// The first n (0 <= n <= 16) of a vector, past which no memory is touched (other dtypes: vector.h).
XOPT_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1U << n) - 1); }
XOPT_INLINE F load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
XOPT_INLINE F load_part(const Bf16* p, int64_t n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
XOPT_INLINE F load_part(const F16* p, int64_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

using I = __m512i;
// Of each lane the value of the lane that `from` names.
XOPT_INLINE F take_lanes(F x, I from) { return _mm512_permutexvar_ps(from, x); }
XOPT_INLINE I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
XOPT_INLINE I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
XOPT_INLINE I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
XOPT_INLINE I sub_int(I a, I b) { return _mm512_sub_epi32(a, b); }
XOPT_INLINE I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
XOPT_INLINE void store_int(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
XOPT_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }

XOPT_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
XOPT_INLINE __m256i to_words(F x, Bf16) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16 && !defined(XOPT_EMULATE)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
#endif
}
XOPT_INLINE __m256i to_words(F x, F16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
XOPT_INLINE void store(Bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_words(x, Bf16{})); }
XOPT_INLINE void store(F16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_words(x, F16{})); }
XOPT_INLINE void store_part(float* p, F x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
XOPT_INLINE void store_part(Bf16* p, F x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), to_words(x, Bf16{}));
}
XOPT_INLINE void store_part(F16* p, F x, int64_t n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_words(x, F16{})); }
// The words of x, and behind them those of y.
XOPT_INLINE __m512i to_words(F x, F y) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16 && !defined(XOPT_EMULATE)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_words(x, Bf16{})), to_words(y, Bf16{}), 1);
#endif
}
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16 && !defined(XOPT_EMULATE)
XOPT_INLINE void store_two(Bf16* p, F x, F y) { _mm512_storeu_si512(p, to_words(x, y)); }
#endif
XOPT_INLINE __m512i saturate(F x, float low, float high) {
  const F number = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
  return _mm512_cvtps_epi32(min(max(number, set1(low)), set1(high)));
}
// Rounded to nearest even and saturated; NaN becomes 0.
XOPT_INLINE void store(int8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(saturate(x, -128.0F, 127.0F)));
}
XOPT_INLINE void store(uint8_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(saturate(x, 0.0F, 255.0F)));
}

}  // namespace xopt::XOPT_ISA
