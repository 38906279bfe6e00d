// Some columns of a series for some steps, as rows of floats that stay in L1, and what callers keep of each column, turned
// so that it lies in such rows.
#pragma once

#include "kernels/series.h"
#include "tiles/any_dtype.h"
#include "tiles/transpose.h"

namespace xopt::XOPT_ISA {

constexpr int64_t kSeriesColumns = 64;    // of an item: a line of bf16, four vectors of floats
constexpr int64_t kSeriesChunk = kUnits;  // steps that are brought in at a time

namespace series {

// The first `count` of 16 values, and zeros.
inline void load_run(const void* data, DType dtype, int64_t from, int64_t count, float* to) {
  for (int64_t i = 0; i < kUnits; i += kWidth) {
    store(to + i, i < count ? load_any(data, dtype, from + i, count - i) : set1(0.0F));
  }
}

inline void copy_units(const float* from, float* to) {
  for (int64_t i = 0; i < kUnits; i += kWidth) store(to + i, load(from + i));
}

inline void turn(const float* rows, float* turned) {
  transpose_tile(reinterpret_cast<const uint8_t*>(rows), kUnits * 4, reinterpret_cast<uint8_t*>(turned));
}

}  // namespace series

// [columns, depth] from an element on, of `count` columns, as [depth, up to whole vectors][kSeriesColumns]; zeros where
// there are none, and without data.
inline void load_turned(const void* data, DType dtype, int64_t from, int64_t count, int64_t depth, float* to) {
  alignas(64) float rows[kUnits * kUnits], turned[kUnits * kUnits];
  for (int64_t column = 0; column < kSeriesColumns; column += kUnits) {
    for (int64_t row = 0; row < depth; row += kUnits) {
      for (int64_t i = 0; i < kUnits; ++i) {
        const bool exists = data != nullptr && column + i < count;
        series::load_run(data, dtype, from + (column + i) * depth + row, exists ? depth - row : 0, rows + i * kUnits);
      }
      series::turn(rows, turned);
      for (int64_t i = 0; i < kUnits; ++i) {
        series::copy_units(turned + i * kUnits, to + (row + i) * kSeriesColumns + column);
      }
    }
  }
}

// The same the other way. Rows are read up to whole vectors.
inline void store_turned(const float* from, int64_t count, int64_t depth, void* data, DType dtype, int64_t to) {
  alignas(64) float turned[kUnits * kUnits];
  for (int64_t column = 0; column < count; column += kUnits) {
    for (int64_t row = 0; row < depth; row += kUnits) {
      const auto* rows = reinterpret_cast<const uint8_t*>(from + row * kSeriesColumns + column);
      transpose_tile(rows, kSeriesColumns * 4, reinterpret_cast<uint8_t*>(turned));
      for (int64_t i = 0; i < minimum(kUnits, count - column); ++i) {
        for (int64_t j = 0; j < minimum(kUnits, depth - row); j += kWidth) {
          const int64_t at = to + (column + i) * depth + row + j;
          store_any(data, dtype, at, load(turned + i * kUnits + j), depth - row - j);
        }
      }
    }
  }
}

struct SeriesPart {
  int64_t batch;
  int64_t step, steps;    // the first one, and how many
  int64_t column, count;  // of columns
};

// A part as [step][padded], with zeros up to `padded` columns. Series whose steps lie side by side are brought in by tiles.
inline void load_chunk(const Series& values, const SeriesPart& part, int64_t padded, float* to) {
  const auto& [batch, step, steps, first, count] = part;
  const int64_t from = batch * values.batch_stride + step * values.step_stride + first * values.column_stride;
  if (values.step_stride == 1 && values.column_stride != 1) {
    alignas(64) float rows[kUnits * kUnits], turned[kUnits * kUnits];
    for (int64_t column = 0; column < padded; column += kUnits) {
      for (int64_t i = 0; i < kUnits; ++i) {
        const int64_t existing = column + i < count ? steps : 0;
        const int64_t at = from + (column + i) * values.column_stride;
        series::load_run(values.data, values.dtype, at, existing, rows + i * kUnits);
      }
      series::turn(rows, turned);
      for (int64_t i = 0; i < steps; ++i) series::copy_units(turned + i * kUnits, to + i * padded + column);
    }
    return;
  }
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t row = from + i * values.step_stride;
    for (int64_t column = 0; column < padded; column += kUnits) {
      float* units = to + i * padded + column;
      if (values.column_stride == 1 || count <= 1) {
        series::load_run(values.data, values.dtype, row + column, count - column, units);
        continue;
      }
      for (int64_t j = 0; j < kUnits; ++j) {
        const int64_t at = row + (column + j) * values.column_stride;
        units[j] = 0;
        if (column + j < count) store_first(units + j, load_any(values.data, values.dtype, at, 1), 1);
      }
    }
  }
}

}  // namespace xopt::XOPT_ISA
