// The transpose of a tile: 16 rows of 16 units of 4 bytes.
#pragma once

#include <emmintrin.h>

#include "tiles/layout.h"
#include "tiles/level.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kUnits = 16;  // of 4 bytes, in a row of a tile

// `from`: 16 rows of 64 bytes, `stride` bytes apart.
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

}  // namespace xopt::XOPT_ISA
