// Rows of A that lie as the columns of a matrix, as those of a transposed one do: neighbouring rows are contiguous, the
// values of a row `k_stride` apart. The copy that a block works on, which is made anyway, turns them, 16 x 16 at a time.
#pragma once

#include "tiles/transpose.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// `count` values of each of `rows` rows into a block's copy. T, the dtype, is one that the copy holds exactly.
template <class Block, class T>
void copy_columns(const T* from, int64_t k_stride, int64_t rows, int64_t count, typename Block::A* to) {
  alignas(64) float columns[kUnits * kUnits] = {}, turned[kUnits * kUnits];
  for (int64_t row = 0; row < rows; row += kUnits) {
    const int64_t here = minimum(kUnits, rows - row);
    for (int64_t k = 0; k < count; k += kUnits) {
      const int64_t depth = minimum(kUnits, count - k);
      for (int64_t i = 0; i < depth; ++i) {
        convert_run<float>(from + (k + i) * k_stride + row, here, columns + i * kUnits);
      }
      transpose_tile(reinterpret_cast<const uint8_t*>(columns), 64, reinterpret_cast<uint8_t*>(turned));
      for (int64_t r = 0; r < here; ++r) {
        convert_run<float>(turned + r * kUnits, depth, to + (row + r) * Block::kStride + k);
      }
    }
  }
}

class Columns {
 public:
  static constexpr bool kInPlace = false;
  Columns(const void* data, DType dtype, int64_t k_stride) : data_(data), dtype_(dtype), k_stride_(k_stride) {}

  // The row at which it is, from some k on.
  class Rows {
   public:
    Rows() = default;
    Rows(const Columns& view, int64_t row, int64_t k)
        : data_(view.data_), dtype_(view.dtype_), k_stride_(view.k_stride_), offset_(k * view.k_stride_ + row) {}

    // Copies `count` values of the next `rows` rows, and zeros up to `padded`.
    template <class Block>
    void copy(int64_t rows, int64_t count, int64_t padded, typename Block::A* to) {
      pad_rows<Block>(rows, count, padded, to);
      if (dtype_ == DType::f32) copy_columns<Block>(at<float>(), k_stride_, rows, count, to);
      if (dtype_ == DType::bf16) copy_columns<Block>(at<Bf16>(), k_stride_, rows, count, to);
      if (dtype_ == DType::f16) copy_columns<Block>(at<F16>(), k_stride_, rows, count, to);
      offset_ += rows;
    }

   private:
    template <class T>
    const T* at() const {
      return static_cast<const T*>(data_) + offset_;
    }

    const void* data_ = nullptr;
    DType dtype_ = DType::f32;
    int64_t k_stride_ = 0, offset_ = 0;
  };

  Rows rows(int64_t row, int64_t k) const { return Rows(*this, row, k); }

  // None: a row's values lie on a line each, and the next rows on the same ones.
  Prefetch prefetch(int64_t, int64_t, int64_t, int64_t) const { return {nullptr, 0, 0, 0}; }

 private:
  const void* data_;
  DType dtype_;
  int64_t k_stride_;
};

}  // namespace xopt::XOPT_ISA
