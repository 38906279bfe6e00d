// Where the rows of A are, and how they come into a block's copy.
//
// A view of which rows are copied answers rows(row, k): a place that copies the elements from (row, k) on, row after row,
// so that what it takes to find a row is done once for a run of rows and never per element. `Merged` (two row dimensions
// taken as one) serves linear layers, `Patches` in patches.h (a window that slides over a padded image) convolutions. A
// view with kInPlace says where blocks find rows: `ImageRows` in image_rows.h.
#pragma once

#include <type_traits>

#include "tiles/block.h"
#include "tiles/copy.h"
#include "tiles/types.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// ---- One run of elements, converted to what a block multiplies ---------------------------------------------------

// Floats: through fp32, rounded to the weight's dtype (so that every level computes with the same A), kept as To.
template <class Round, class To, class From>
XOPT_INLINE void convert_run(const From* from, int64_t count, To* to) {
  const auto convert = [](F x) {
    if constexpr (sizeof(To) == 4 && sizeof(Round) == 2 && !std::is_same_v<Round, From>) x = round_to<Round>(x);
    return x;
  };
  if (count < kWidth) {
    if (count > 0) store_first(to, convert(load_first(from, count)), count);
    return;
  }
  for (int64_t i = 0; i + kWidth < count; i += kWidth) store(to + i, convert(load(from + i)));
  store(to + count - kWidth, convert(load(from + count - kWidth)));  // some of them again
}

// Integers: as they are, widened, or moved by an offset of 128 that makes s8 into u8.
template <int32_t Offset, class From, class To>
void convert_int_run(const uint8_t* data, int64_t count, To* to) {
  if constexpr (sizeof(To) == 1 && Offset == 0) return copy_bytes(data, count, to);
  const auto* from = reinterpret_cast<const From*>(data);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i] + Offset);
}

// Floats into a block's copy: as they are where the copy holds their dtype and nothing is to be rounded.
template <class Block, class From>
XOPT_INLINE void copy_floats(const uint8_t* from, int64_t count, typename Block::A* to) {
  using A = typename Block::A;
  using Round = std::conditional_t<sizeof(A) == 2, A, typename Block::Round>;
  if constexpr (std::is_same_v<From, A> && sizeof(Round) == sizeof(A)) {
    copy_bytes(from, count * static_cast<int64_t>(sizeof(A)), to);
  } else {
    convert_run<Round>(reinterpret_cast<const From*>(from), count, to);
  }
}

// `count` elements into a block's copy.
template <class Block>
XOPT_INLINE void copy_run(DType dtype, const uint8_t* from, int64_t count, typename Block::A* to) {
  if constexpr (Block::kIsInt) {
    convert_int_run<Block::kOffset, typename Block::Round>(from, count, to);
  } else if (dtype == DType::f32) {
    copy_floats<Block, float>(from, count, to);
  } else if (dtype == DType::bf16) {
    copy_floats<Block, Bf16>(from, count, to);
  } else {
    copy_floats<Block, F16>(from, count, to);
  }
}

template <class Block, class From>
void copy_float_runs(const uint8_t* from, int64_t step, int64_t rows, int64_t count, typename Block::A* to) {
  for (int64_t row = 0; row < rows; ++row)
    copy_floats<Block, From>(from + row * step, count, to + row * Block::kStride);
}

// The same for `rows` runs that begin `step` bytes apart, each into a row of the copy. Nothing is decided for each of
// many short runs.
template <class Block>
void copy_runs(DType dtype, const uint8_t* from, int64_t step, int64_t rows, int64_t count, typename Block::A* to) {
  if (count == 0) return;  // of an empty tensor, whose memory may be nowhere
  if constexpr (Block::kIsInt) {
    for (int64_t row = 0; row < rows; ++row) {
      copy_run<Block>(dtype, from + row * step, count, to + row * Block::kStride);
    }
  } else if (dtype == DType::f32) {
    copy_float_runs<Block, float>(from, step, rows, count, to);
  } else if (dtype == DType::bf16) {
    copy_float_runs<Block, Bf16>(from, step, rows, count, to);
  } else {
    copy_float_runs<Block, F16>(from, step, rows, count, to);
  }
}

// Zeros behind the `count` elements of each row, which are not there yet.
template <class Block>
XOPT_INLINE void pad_rows(int64_t rows, int64_t count, int64_t padded, typename Block::A* to) {
  if (padded == count) return;
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  // To call memset for each row takes longer than to copy a short one.
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(*to));
  if (padded >= kLine && padded - count <= kLine) {
    for (int64_t row = 0; row < rows; ++row) __builtin_memset(to + row * Block::kStride + padded - kLine, 0, 64);
    return;
  }
#endif
  for (int64_t row = 0; row < rows; ++row) {
    __builtin_memset(to + row * Block::kStride + count, 0, static_cast<size_t>(padded - count) * sizeof(*to));
  }
}

// Rows `step` bytes apart; 0: there are none such.
struct EvenRows {
  const uint8_t* data = nullptr;
  int64_t step = 0;
};

// [outer, inner_rows, k] with a stride for each of the two, k contiguous.
class Merged {
 public:
  static constexpr bool kInPlace = false;
  explicit Merged(const RowsView& rows) : rows_(rows), size_(dtype_size(rows.dtype)) {}

  // The row at which it is, from some k on.
  class Rows {
   public:
    Rows() = default;
    Rows(const Merged& view, int64_t row, int64_t k)
        : data_(view.data(row, k)),
          dtype_(view.rows_.dtype),
          inner_(row % view.rows_.inner_rows),
          inner_rows_(view.rows_.inner_rows),
          step_(view.rows_.row_stride * view.size_),
          outer_step_((view.rows_.outer_stride - inner_rows_ * view.rows_.row_stride) * view.size_) {}

    // Copies `count` elements of the next `rows` rows, and zeros up to `padded`.
    template <class Block>
    void copy(int64_t rows, int64_t count, int64_t padded, typename Block::A* to) {
      pad_rows<Block>(rows, count, padded, to);
      while (rows > 0) {
        const int64_t run = minimum(rows, inner_rows_ - inner_);
        copy_runs<Block>(dtype_, data_, step_, run, count, to);
        to += run * Block::kStride;
        rows -= run;
        data_ += run * step_;
        inner_ += run;
        if (inner_ == inner_rows_) {
          inner_ = 0;
          data_ += outer_step_;
        }
      }
    }

   private:
    const uint8_t* data_ = nullptr;
    DType dtype_ = DType::f32;
    int64_t inner_ = 0, inner_rows_ = 1, step_ = 0, outer_step_ = 0;
  };

  Rows rows(int64_t row, int64_t k) const { return Rows(*this, row, k); }

  // The first `count` rows, if they are evenly apart.
  EvenRows even_rows(int64_t count) const {
    const bool even = count <= rows_.inner_rows || rows_.outer_stride == rows_.inner_rows * rows_.row_stride;
    if (!even) return {};
    return {static_cast<const uint8_t*>(rows_.data), rows_.row_stride * size_};
  }
  DType dtype() const { return rows_.dtype; }

  XOPT_INLINE const uint8_t* data(int64_t row, int64_t k) const {
    const int64_t offset = row / rows_.inner_rows * rows_.outer_stride + row % rows_.inner_rows * rows_.row_stride + k;
    return static_cast<const uint8_t*>(rows_.data) + offset * size_;
  }
  // The lines of `count` rows, a step along k after the other.
  Prefetch prefetch(int64_t row, int64_t k, int64_t count, int64_t k_step) const {
    return {data(row, k), k_step * size_, rows_.row_stride * size_, count};
  }

 private:
  RowsView rows_;
  int64_t size_;
};

// The sum of a row of a block's copy, as it was before the offset.
template <class Block>
int32_t sum_run(const typename Block::A* row, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += row[i] - Block::kOffset;
  return sum;
}

}  // namespace xopt::XOPT_ISA
