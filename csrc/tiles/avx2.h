// The vector vocabulary at level `avx2`: 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "tiles/halves.h"

namespace xopt::XOPT_ISA {

using F = __m256;
inline constexpr int kWidth = 8;

XOPT_INLINE F set1(float x) { return _mm256_set1_ps(x); }
XOPT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
XOPT_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
XOPT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
XOPT_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
// 1 / a, for a and the result normal.
XOPT_INLINE F reciprocal(F a) { return div(set1(1.0F), a); }
XOPT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
// The second operand if either is NaN. Clamps keep NaN by passing the value second.
XOPT_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
XOPT_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
XOPT_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
XOPT_INLINE F copy_sign(F magnitude, F sign) {
  return _mm256_or_ps(abs(magnitude), _mm256_and_ps(_mm256_set1_ps(-0.0F), sign));
}
// a < b ? x : y
XOPT_INLINE F select_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
// x * 2^n for n integral and the result normal or zero.
XOPT_INLINE F scale_exponent(F x, F n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
XOPT_INLINE F round_even(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// What is above the next lower whole number, and x times 2 to the power of that number.
XOPT_INLINE F fraction(F a) { return _mm256_sub_ps(a, _mm256_floor_ps(a)); }
XOPT_INLINE F scale_by_floor(F x, F n) { return scale_exponent(x, _mm256_floor_ps(n)); }
XOPT_INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }
XOPT_INLINE float reduce_add(F a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

XOPT_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
XOPT_INLINE F load(const int32_t* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
XOPT_INLINE F load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
XOPT_INLINE F load(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
XOPT_INLINE F load(const Bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
XOPT_INLINE F load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

// The first n (0 < n < 8) of a vector, past which no memory is touched (other dtypes: vector.h). Pieces meet in
// registers: loads of what was just stored in smaller pieces wait until it is in the cache.
XOPT_INLINE __m128i load_words(const void* p, int64_t n) {
  const auto* words = static_cast<const uint16_t*>(p);
  if (n < 4) {
    const auto low = static_cast<uint64_t>(words[0]), middle = static_cast<uint64_t>(words[n / 2]);
    return _mm_cvtsi64_si128(
        static_cast<long long>(low | middle << (n / 2 * 16) | static_cast<uint64_t>(words[n - 1]) << ((n - 1) * 16)));
  }
  const __m128i low = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  if (n == 4) return low;
  uint64_t last;
  __builtin_memcpy(&last, words + n - 4, 8);
  return _mm_insert_epi64(low, static_cast<long long>(last >> ((8 - n) * 16)), 1);
}
XOPT_INLINE F load_part(const float* p, int64_t n) {
  const __m256i ramp = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), ramp));
}
XOPT_INLINE F load_part(const Bf16* p, int64_t n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p, n)), 16));
}
XOPT_INLINE F load_part(const F16* p, int64_t n) { return _mm256_cvtph_ps(load_words(p, n)); }

using I = __m256i;
// Of each lane the value of the lane that `from` names.
XOPT_INLINE F take_lanes(F x, I from) { return _mm256_permutevar8x32_ps(x, from); }
XOPT_INLINE I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
XOPT_INLINE I load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
XOPT_INLINE I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
XOPT_INLINE I sub_int(I a, I b) { return _mm256_sub_epi32(a, b); }
XOPT_INLINE I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
XOPT_INLINE void store_int(int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
XOPT_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }

// The low halves of 8 dwords.
XOPT_INLINE __m128i pack_words(__m256i x) {
  const __m256i words = _mm256_packus_epi32(x, x);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08));
}

XOPT_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
XOPT_INLINE __m128i to_words(F x, Bf16) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return pack_words(_mm256_blendv_epi8(rounded, quiet, nan));
}
XOPT_INLINE __m128i to_words(F x, F16) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
XOPT_INLINE void store(Bf16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_words(x, Bf16{})); }
XOPT_INLINE void store(F16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_words(x, F16{})); }

// Stores of parts, as loads of parts above; a store under a mask is microcode on some processors.
XOPT_INLINE void store_words(void* p, __m128i x, int64_t n) {
  auto* words = static_cast<uint16_t*>(p);
  if ((n & 4) != 0) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(words), x);
    x = _mm_unpackhi_epi64(x, x);
    words += 4;
  }
  auto rest = static_cast<uint64_t>(_mm_cvtsi128_si64(x));
  if ((n & 2) != 0) {
    __builtin_memcpy(words, &rest, 4);
    rest >>= 32;
    words += 2;
  }
  if ((n & 1) != 0) __builtin_memcpy(words, &rest, 2);
}
XOPT_INLINE void store_part(float* p, F x, int64_t n) {
  __m128 rest = _mm256_castps256_ps128(x);
  if ((n & 4) != 0) {
    _mm_storeu_ps(p, rest);
    rest = _mm256_extractf128_ps(x, 1);
    p += 4;
  }
  if ((n & 2) != 0) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), rest);
    rest = _mm_movehl_ps(rest, rest);
    p += 2;
  }
  if ((n & 1) != 0) _mm_store_ss(p, rest);
}
XOPT_INLINE void store_part(Bf16* p, F x, int64_t n) { store_words(p, to_words(x, Bf16{}), n); }
XOPT_INLINE void store_part(F16* p, F x, int64_t n) { store_words(p, to_words(x, F16{}), n); }
XOPT_INLINE __m256i saturate(F x, float low, float high) {
  const F number = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
  return _mm256_cvtps_epi32(min(max(number, set1(low)), set1(high)));
}
// Rounded to nearest even and saturated; NaN becomes 0.
XOPT_INLINE void store(int8_t* p, F x) {
  const __m128i words = pack_words(_mm256_and_si256(saturate(x, -128.0F, 127.0F), _mm256_set1_epi32(0xff)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
XOPT_INLINE void store(uint8_t* p, F x) {
  const __m128i words = pack_words(saturate(x, 0.0F, 255.0F));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}

}  // namespace xopt::XOPT_ISA
