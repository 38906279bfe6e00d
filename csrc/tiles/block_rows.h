// Where a vector block finds its rows of A, and its loops over a tile of weights.
#pragma once

#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// A float, or a pair of bf16, wherever rows begin.
using RowValue [[gnu::aligned(1), gnu::may_alias]] = float;

// R rows of floats, or of what takes as much room, from some k on, any distance apart: those of A itself need no copy. Of Share rows the first has a
// register; the others, two at most, lie one and two distances on, which an address can say by itself.
template <int R, int Share>
class BlockRows {
  static_assert(Share <= 3);

 public:
  XOPT_INLINE BlockRows(const void* a, int64_t step) : step_(step) {
    const auto* row = static_cast<const uint8_t*>(a);
#pragma GCC unroll 7
    for (int i = 0; i < kPointers; ++i) at_[i] = row + Share * i * step;
    hide();
  }
  XOPT_INLINE const RowValue& at(int row, int k) const {
    return *reinterpret_cast<const RowValue*>(at_[row / Share] + row % Share * step_ + 4 * k);
  }
  static constexpr bool has_pointer(int row) { return row % Share == 0; }
  XOPT_INLINE void advance(int count) {
#pragma GCC unroll 7
    for (int i = 0; i < kPointers; ++i) at_[i] += 4 * count;
    hide();
  }

 private:
  static constexpr int kPointers = (R + Share - 1) / Share;
  // GCC would make a pointer of each row, or an index of each row and k, and keep half of these on the stack.
  XOPT_INLINE void hide() {
    asm("" : "+r"(step_));
#pragma GCC unroll 7
    for (int i = 0; i < kPointers; ++i) asm("" : "+r"(at_[i]));
  }

  const uint8_t* at_[kPointers];
  int64_t step_;
};

// Of A, for a row of a tile.
template <class Block>
inline constexpr int kValuesOfRow = Block::kTileK / kTileRows * static_cast<int64_t>(sizeof(typename Block::A)) / 4;

// Adds the products of a tile. Block::multiply_k does those of a row of it, and of as many k of A, the `row`th of those
// that `a` is at: multiply_k(b, a, row, acc).
template <class Block, int Unrolled, class Rows, int V, int R>
XOPT_INLINE void multiply_tile(const uint8_t* b, Rows& a, F (&acc)[V][R]) {
  for (int j = 0; j < kTileRows; j += Unrolled, b += 64 * Unrolled) {
#pragma GCC unroll 16
    for (int i = 0; i < Unrolled; ++i) Block::multiply_k(b + 64 * i, a, i, acc);
    a.advance(Unrolled * kValuesOfRow<Block>);
  }
}
// Of a tile's first rows.
template <class Block, class Rows, int V, int R>
XOPT_INLINE void multiply_rows(int64_t rows, const uint8_t* b, Rows& a, F (&acc)[V][R]) {
  for (int64_t j = 0; j < rows; ++j) {
    Block::multiply_k(b + 64 * j, a, 0, acc);
    a.advance(kValuesOfRow<Block>);
  }
}

}  // namespace xopt::XOPT_ISA
