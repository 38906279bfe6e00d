// Rows of a vector each into one number each.
#pragma once

#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// Of each of `rows` rows of kWidth floats one, by `both`, and `none` for those up to N.
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// Of 16 rows: each instruction halves two rows, or two pairs of them, ... so that 46 do for all of them.
template <class Both>
XOPT_INLINE F reduce_sixteen(const float* rows, const Both& both) {
  F by_8[8], by_4[4], by_2[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const F x = load(rows + i * kWidth), y = load(rows + (i + 8) * kWidth);
    by_8[i] = both(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const F x = by_8[i], y = by_8[i + 4];
    by_4[i] = both(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const F x = by_4[i], y = by_4[i + 2];
    by_2[i] = both(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
  }
  const F all = both(_mm512_shuffle_ps(by_2[0], by_2[1], 0x88), _mm512_shuffle_ps(by_2[0], by_2[1], 0xdd));
  // Rows 0, 2, 1, 3, then those 8, 4 and 12 further on.
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0), all);
}
template <int64_t N, class Both>
void reduce_rows(float* vectors, int64_t rows, float none, float* to, const Both& both) {
  for (int64_t row = rows; row < N; ++row) store(vectors + row * kWidth, set1(none));
  for (int64_t row = 0; row < N; row += kWidth) store(to + row, reduce_sixteen(vectors + row * kWidth, both));
}
#else
template <int64_t N, class Both>
void reduce_rows(float* vectors, int64_t rows, float none, float* to, const Both& both) {
  for (int64_t row = 0; row < N; ++row) {
    float* lanes = vectors + row * kWidth;
    for (int64_t half = kWidth / 2; half > 0 && row < rows; half /= 2) {
      for (int64_t i = 0; i < half; ++i) {
        store_first(lanes + i, both(load_first(lanes + i, 1), load_first(lanes + i + half, 1)), 1);
      }
    }
    to[row] = row < rows ? lanes[0] : none;
  }
}
#endif

}  // namespace xopt::XOPT_ISA
