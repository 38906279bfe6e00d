// The transpose of a tile: 16 rows of 16 units of 4 bytes.
#pragma once

#include <immintrin.h>

#include "tiles/layout.h"
#include "tiles/level.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kUnits = 16;  // of 4 bytes, in a row of a tile

// `from`: 16 rows of 64 bytes, `stride` bytes apart.
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// Four units of each row at a time: loads bring every fourth row together, so that each part of a vector is left to
// transpose by itself, and the results are whole rows.
XOPT_INLINE void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to) {
  for (int64_t column = 0; column < kUnits; column += 4) {
    __m512i in[4];
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r) {
      const auto part = [&](int64_t i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (4 * i + r) * stride + column * 4));
      };
      in[r] = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
      in[r] = _mm512_inserti32x4(_mm512_inserti32x4(in[r], part(2), 2), part(3), 3);
    }
    const __m512i ab_low = _mm512_unpacklo_epi32(in[0], in[1]), ab_high = _mm512_unpackhi_epi32(in[0], in[1]);
    const __m512i cd_low = _mm512_unpacklo_epi32(in[2], in[3]), cd_high = _mm512_unpackhi_epi32(in[2], in[3]);
    _mm512_storeu_si512(to + column * 64, _mm512_unpacklo_epi64(ab_low, cd_low));
    _mm512_storeu_si512(to + (column + 1) * 64, _mm512_unpackhi_epi64(ab_low, cd_low));
    _mm512_storeu_si512(to + (column + 2) * 64, _mm512_unpacklo_epi64(ab_high, cd_high));
    _mm512_storeu_si512(to + (column + 3) * 64, _mm512_unpackhi_epi64(ab_high, cd_high));
  }
}
#else
XOPT_INLINE void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to) {
  for (int64_t row = 0; row < kUnits; row += 4) {
    for (int64_t column = 0; column < kUnits; column += 4) {
      __m128i in[4];
      for (int64_t r = 0; r < 4; ++r) {
        in[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (row + r) * stride + column * 4));
      }
      const __m128i ab_low = _mm_unpacklo_epi32(in[0], in[1]), ab_high = _mm_unpackhi_epi32(in[0], in[1]);
      const __m128i cd_low = _mm_unpacklo_epi32(in[2], in[3]), cd_high = _mm_unpackhi_epi32(in[2], in[3]);
      const __m128i out[4] = {_mm_unpacklo_epi64(ab_low, cd_low), _mm_unpackhi_epi64(ab_low, cd_low),
                              _mm_unpacklo_epi64(ab_high, cd_high), _mm_unpackhi_epi64(ab_high, cd_high)};
      for (int64_t r = 0; r < 4; ++r) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (column + r) * 64 + row * 4), out[r]);
      }
    }
  }
}
#endif

}  // namespace xopt::XOPT_ISA
