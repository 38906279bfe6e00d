// Rows of a matrix: where they are, and loops over the vectors of one.
#pragma once

#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// nullptr where there is no data.
XOPT_INLINE const uint8_t* row_of(const RowsView& view, int64_t row) {
  if (view.data == nullptr) return nullptr;
  // Most views have one stride, and a 64-bit division costs as much as the norm of a hundred values.
  const int64_t outer = row < view.inner_rows ? 0 : row / view.inner_rows;
  const int64_t offset = outer * view.outer_stride + (row - outer * view.inner_rows) * view.row_stride;
  return static_cast<const uint8_t*>(view.data) + offset * dtype_size(view.dtype);
}

// Runs f(i, count) for each vector of a row; a constant `count` leaves no trace of the tail in the loop.
template <class Function>
XOPT_INLINE void for_each_vector(int64_t columns, const Function& f) {
  int64_t i = 0;
  for (; i + kWidth <= columns; i += kWidth) f(i, kWidth);
  if (i < columns) f(i, columns - i);
}

inline constexpr int64_t kSums = 4;  // one would wait for each addition

// The sum of f(i, count), which are zero past their first `count` values.
template <class Function>
XOPT_INLINE float sum_of(int64_t columns, const Function& f) {
  F sums[kSums];
#pragma GCC unroll 4
  for (int64_t s = 0; s < kSums; ++s) sums[s] = set1(0.0F);
  int64_t i = 0;
  for (; i + kSums * kWidth <= columns; i += kSums * kWidth) {
#pragma GCC unroll 4
    for (int64_t s = 0; s < kSums; ++s) sums[s] = add(sums[s], f(i + s * kWidth, kWidth));
  }
  for (; i + kWidth <= columns; i += kWidth) sums[0] = add(sums[0], f(i, kWidth));
  if (i < columns) sums[1] = add(sums[1], f(i, columns - i));
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

XOPT_INLINE F first_of(F x, int64_t count) {
  if (count >= kWidth) return x;
  float buffer[kWidth];
  store(buffer, x);
  return load_first(buffer, count);
}

}  // namespace xopt::XOPT_ISA
