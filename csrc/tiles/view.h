// Where the rows of A are, and how they come into a block's copy.
//
// A view answers run(row, k): where that element lies and how many more follow it contiguously, or nullptr for a run of
// zeros. It is asked once per run, never per element, and its transforms compose: `Merged` (two row dimensions taken as
// one) serves linear layers; a convolution adds padding and a sliding window and leaves the rest as it is.
#pragma once

#include "tiles/types.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

struct Run {
  const uint8_t* data;
  int64_t length;  // elements
};

// [outer, inner_rows, k] with a stride for each of the two, k contiguous.
class Merged {
 public:
  Merged(const RowsView& rows, int64_t k) : rows_(rows), k_(k), size_(dtype_size(rows.dtype)) {}

  XOPT_INLINE Run run(int64_t row, int64_t k) const {
    const int64_t offset = row / rows_.inner_rows * rows_.outer_stride + row % rows_.inner_rows * rows_.row_stride + k;
    return {static_cast<const uint8_t*>(rows_.data) + offset * size_, k_ - k};
  }
  DType dtype() const { return rows_.dtype; }

 private:
  RowsView rows_;
  int64_t k_, size_;
};

// ---- One run of elements, converted to what a block multiplies ---------------------------------------------------

// Floats: through fp32, rounded to the weight's dtype (so that every level computes with the same A), kept as To.
template <class Round, class To, class From>
XOPT_INLINE void convert_run(const From* from, int64_t count, To* to) {
  for (int64_t i = 0; i < count; i += kWidth) {
    F x = load_first(from + i, count - i);
    if constexpr (sizeof(To) == 4 && sizeof(Round) == 2) x = round_to<Round>(x);
    store_first(to + i, x, count - i);
  }
}

XOPT_INLINE void copy_bytes(const void* from, int64_t bytes, void* to) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  // Inline, and a line at a time: rows are short, and a call for each would cost as much as the copy.
  const auto* source = static_cast<const uint8_t*>(from);
  auto* target = static_cast<uint8_t*>(to);
  for (; bytes >= 64; bytes -= 64, source += 64, target += 64) {
    _mm512_storeu_si512(target, _mm512_loadu_si512(source));
  }
  const __mmask64 rest = (uint64_t{1} << bytes) - 1;
  _mm512_mask_storeu_epi8(target, rest, _mm512_maskz_loadu_epi8(rest, source));
#else
  __builtin_memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

template <class Round, class To>
void convert_float_run(DType dtype, const uint8_t* from, int64_t count, To* to) {
  if (dtype == DType::f32) {
    if constexpr (sizeof(Round) == 4) return copy_bytes(from, count * 4, to);
    convert_run<Round>(reinterpret_cast<const float*>(from), count, to);
  } else if (dtype == DType::bf16) {
    convert_run<Round>(reinterpret_cast<const Bf16*>(from), count, to);
  } else {
    convert_run<Round>(reinterpret_cast<const F16*>(from), count, to);
  }
}

// Integers: as they are, widened, or moved by an offset of 128 that makes s8 into u8.
template <int32_t Offset, class From, class To>
void convert_int_run(const uint8_t* data, int64_t count, To* to) {
  if constexpr (sizeof(To) == 1 && Offset == 0) return copy_bytes(data, count, to);
  const auto* from = reinterpret_cast<const From*>(data);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i] + Offset);
}

// Copies `count` elements from (row, k) on into `to`, and zeros up to `padded`.
template <class Block, class View>
void copy_row(const View& view, int64_t row, int64_t k, int64_t count, int64_t padded, typename Block::A* to) {
  using A = typename Block::A;
  int64_t done = 0;
  while (done < count) {
    const Run run = view.run(row, k + done);
    const int64_t length = minimum(run.length, count - done);
    if (run.data == nullptr) {
      __builtin_memset(to + done, 0, static_cast<size_t>(length) * sizeof(A));
    } else if constexpr (Block::kIsInt) {
      convert_int_run<Block::kOffset, typename Block::Round>(run.data, length, to + done);
    } else if constexpr (sizeof(A) == 2) {
      // bf16 into bf16 is the common case and a plain copy.
      if (view.dtype() == DType::bf16) {
        copy_bytes(run.data, length * 2, to + done);
      } else {
        convert_float_run<A>(view.dtype(), run.data, length, to + done);
      }
    } else {
      convert_float_run<typename Block::Round>(view.dtype(), run.data, length, to + done);
    }
    done += length;
  }
  __builtin_memset(to + count, 0, static_cast<size_t>(padded - count) * sizeof(A));
}

template <class From>
int32_t sum_run(const uint8_t* data, int64_t count) {
  const auto* from = reinterpret_cast<const From*>(data);
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += from[i];
  return sum;
}

}  // namespace xopt::XOPT_ISA
