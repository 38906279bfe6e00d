// 2^x as bf16, 32 at a time, in integers of 16 bits: half the instructions of a polynomial in floats that is rounded.
//
// The bits of a bf16, taken as a number, are its logarithm but for a correction within each octave: 128 (x + 127) less
// 128 (r + 1 - 2^r), where r is the part of x above a whole number. So x becomes a count of half units in the last place of
// the result, six bits of r look the correction up, and a shift rounds. Errors are 1.9e-3 of the value (root mean square,
// without bias; the largest 6.2e-3), where rounding alone makes 1.7e-3 (3.9e-3).
#pragma once

#include "tiles/vector.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
#if defined(XOPT_EMULATE)
#include "tiles/emulate.h"
#endif

namespace xopt::XOPT_ISA {

// x as the count that exp2_words takes: kExp2Scale * x + kExp2Offset, of which the half below 0.5 rounds. The result is
// exactly 1 for x = 0, and 0 for all x below -127, minus infinity included. Of x from 128 on come infinities and NaN, of NaN
// comes 0.
inline constexpr float kExp2Scale = 256.0F, kExp2Offset = 2 * 127 * 128 + 0.5F;

// 256 (r + 1 - 2^r), rounded, of the middle of each 64th of an octave; four counts have an entry in common.
#define XOPT_EXP2_CORRECTIONS                                                                                          \
  0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 13, 14, 15, 16, 16, 17, 18, 18, 19, 19, 20, 20, 20, 21, 21, 21, 22, 22,   \
      22, 22, 22, 22, 22, 22, 22, 22, 21, 21, 21, 20, 20, 20, 19, 19, 18, 17, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, \
      5, 4, 3, 1
alignas(64) inline constexpr uint8_t kExp2CorrectionBytes[64] = {XOPT_EXP2_CORRECTIONS};
alignas(64) inline constexpr uint16_t kExp2Corrections[64] = {XOPT_EXP2_CORRECTIONS};
#undef XOPT_EXP2_CORRECTIONS

XOPT_INLINE __m512i exp2_correction(__m512i counts) {
  const __m512i index = _mm512_srli_epi16(counts, 2);  // of which the permutes take the low six bits
#if XOPT_LEVEL >= XOPT_LEVEL_AMX && !defined(XOPT_EMULATE)
  constexpr __mmask64 kLowBytes = 0x5555555555555555;
  return _mm512_maskz_permutexvar_epi8(kLowBytes, index, _mm512_load_si512(kExp2CorrectionBytes));
#else
  return _mm512_permutex2var_epi16(_mm512_load_si512(kExp2Corrections), index,
                                   _mm512_load_si512(kExp2Corrections + 32));
#endif
}

// Counts of 32 values of x, 16 and 16, as words.
XOPT_INLINE __m512i exp2_counts(F first, F second) {
  const __m512i in_order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);  // packing goes by 128 bits
  const __m512i packed = _mm512_packus_epi32(_mm512_cvtps_epi32(first), _mm512_cvtps_epi32(second));
  return _mm512_permutexvar_epi64(in_order, packed);
}
XOPT_INLINE __m512i exp2_words(__m512i counts) {
  return _mm512_srli_epi16(_mm512_subs_epu16(counts, exp2_correction(counts)), 1);
}

// sum + the words, two by two.
XOPT_INLINE F add_words(F sum, __m512i words) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
#if defined(XOPT_EMULATE)
  return emulated_dpbf16(sum, words, ones);
#else
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(ones));
#endif
}

}  // namespace xopt::XOPT_ISA
#endif
