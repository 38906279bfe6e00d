// Where a vector block finds its rows of A, and its loops over a tile of weights.
#pragma once

#include "tiles/block.h"

namespace xopt::XOPT_ISA {

// A float, or a pair of bf16, wherever rows begin.
using RowValue [[gnu::aligned(1), gnu::may_alias]] = float;

// R rows of floats, or of what takes as much room, from some k on, any distance apart: those of A itself need no copy. Every
// other row has a register; the one after it lies a distance on, which an address can say by itself.
template <int R>
class BlockRows {
  static constexpr int kPointers = (R + kRowsOfPointer - 1) / kRowsOfPointer;
  static_assert(kPointers <= kMostPointers);

 public:
  // Rows of a copy are `copy_step` bytes apart.
  XOPT_INLINE BlockRows(const BlockCall& call, int64_t copy_step)
      : step_(call.a_stride != 0 ? call.a_stride : copy_step) {
    const auto* row = static_cast<const uint8_t*>(call.a);
    if (call.a_rows != nullptr) {
#pragma GCC unroll 7
      for (int i = 0; i < kPointers; ++i) at_[i] = row + call.a_rows[i];
    } else {
#pragma GCC unroll 7
      for (int i = 0; i < kPointers; ++i) at_[i] = row + kRowsOfPointer * i * step_;
    }
    hide();
  }
  XOPT_INLINE const RowValue& at(int row, int k) const {
    return *reinterpret_cast<const RowValue*>(at_[row / kRowsOfPointer] + row % kRowsOfPointer * step_ + 4 * k);
  }
  XOPT_INLINE void advance(int64_t bytes) {
#pragma GCC unroll 7
    for (int i = 0; i < kPointers; ++i) at_[i] += bytes;
    hide();
  }

 private:
  // GCC would make a pointer of each row, or an index of each row and k, and keep half of these on the stack.
  XOPT_INLINE void hide() {
    asm("" : "+r"(step_));
#pragma GCC unroll 7
    for (int i = 0; i < kPointers; ++i) asm("" : "+r"(at_[i]));
  }

  const uint8_t* at_[kPointers];
  int64_t step_;
};

// Bytes of A for a row of a tile.
template <class Block>
inline constexpr int64_t kBytesOfRow = Block::kTileK / kTileRows * static_cast<int64_t>(sizeof(typename Block::A));

// Adds the products of a tile with the rows of A from First on, all but the Rest last. Block::multiply_k does those of one
// row of the tile, and of as many k of A, the `row`th of those that `a` is at: multiply_k(b, a, row, acc).
template <class Block, int Unrolled, int First = 0, int Rest = 0, class Rows, int V, int R>
XOPT_INLINE void multiply_tile(const uint8_t* b, Rows& a, F (&acc)[V][R]) {
  for (int j = 0; j < kTileRows; j += Unrolled, b += 64 * Unrolled) {
#pragma GCC unroll 16
    for (int i = 0; i < Unrolled; ++i) Block::template multiply_k<First, Rest>(b + 64 * i, a, i, acc);
    a.advance(Unrolled * kBytesOfRow<Block>);
  }
}
// Of a tile's first rows. Blocks of one vector of columns have many of these: narrow groups of a convolution.
template <class Block, class Rows, int V, int R>
XOPT_INLINE void multiply_rows(int64_t rows, const uint8_t* b, Rows& a, F (&acc)[V][R]) {
  if constexpr (V == 1) {
    for (; rows >= 4; rows -= 4, b += 256) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) Block::template multiply_k<0, 0>(b + 64 * i, a, i, acc);
      a.advance(4 * kBytesOfRow<Block>);
    }
  }
  for (int64_t j = 0; j < rows; ++j, b += 64) {
    Block::template multiply_k<0, 0>(b, a, 0, acc);
    a.advance(kBytesOfRow<Block>);
  }
}

// Of whole tiles up to `stop`, without the rows of A that are outside of an image for this piece.
template <class Block, int Unrolled, int First, int Rest, int V, int R, class Rows, class Step>
XOPT_INLINE void multiply_some(const uint8_t* stop, const uint8_t** tile, Rows& a, F (&acc)[V][R], const Step& step) {
  for (; *tile != stop; *tile += 2 * kTileBytes) {
    step();
    multiply_tile<Block, Unrolled, First, Rest>(*tile, a, acc);
  }
}
template <class Block, int Unrolled, int V, int R, class Rows, class Step>
XOPT_INLINE void multiply_inside(const Piece& piece, const uint8_t* stop, const uint8_t** tile, Rows& a, F (&acc)[V][R],
                                 const Step& step) {
  if ((piece.outside & kFirstOutside) != 0) {
    multiply_some<Block, Unrolled, 1, 0>(stop, tile, a, acc, step);
  } else {
    multiply_some<Block, Unrolled, 0, 1>(stop, tile, a, acc, step);
  }
}
// Whether blocks of so many rows do.
template <class Block>
constexpr bool leaves_out_rows(int64_t rows) {
  return rows >= Block::kLeastLineRows;
}

// The end of the tiles, or pieces, whose products are one chain of sums.
template <class Block>
XOPT_INLINE int64_t chain_end(const BlockCall& call, int64_t begin) {
  if (call.pieces == nullptr) return minimum(begin + Block::kChainTiles, call.k_tiles);
  while (begin < call.k_tiles && call.pieces[begin].ends_chain == 0) ++begin;
  return minimum(begin + 1, call.k_tiles);
}

// Adds the products of the tiles [begin, end) along k, or of the pieces, for some columns of the panel. step() is called
// before each tile.
template <class Block, int Unrolled, int V, int R, class Step>
XOPT_INLINE void multiply_tiles(const BlockCall& call, int64_t begin, int64_t end, int64_t column, F (&acc)[V][R],
                                const Step& step) {
  typename Block::template ARows<R> a(call, Block::kStride * static_cast<int64_t>(sizeof(typename Block::A)));
  const uint8_t* b = call.b + column / kTileColumns * kTileBytes + column % kTileColumns * 4;
  if (call.diagonal != 0) {
    b += column / Block::kTileK * 2 * kTileBytes + column % Block::kTileK / (Block::kTileK / kTileRows) * 64;
    a.advance(column * static_cast<int64_t>(sizeof(typename Block::A)));
  }
  int64_t tiles = end - begin, rows = 0;
  const Piece *piece = nullptr, *last = nullptr;
  const uint8_t* tile = b + begin * 2 * kTileBytes;
  int64_t at = 0;  // where `a` is, from where rows begin
  if (call.pieces != nullptr) {
    piece = call.pieces + begin;
    last = call.pieces + end - 1;
  } else {
    a.advance(begin * kTileRows * kBytesOfRow<Block>);
    if (end == call.k_tiles && call.last_rows < kTileRows) {
      --tiles;
      rows = call.last_rows;
    }
  }
  while (true) {
    if (piece != nullptr) {
      a.advance(piece->a - at);
      tile = b + piece->b;
      tiles = piece->tiles;
      rows = piece->rows;
      at = piece->a + (tiles * kTileRows + rows) * kBytesOfRow<Block>;
    }
    const uint8_t* stop = tile + tiles * 2 * kTileBytes;
    if constexpr (leaves_out_rows<Block>(R)) {
      if (piece != nullptr && (piece->outside & call.outside) != 0) {
        multiply_inside<Block, Unrolled>(*piece, stop, &tile, a, acc, step);
      }
    }
    for (; tile != stop; tile += 2 * kTileBytes) {
      step();
      multiply_tile<Block, Unrolled>(tile, a, acc);
    }
    if (rows > 0) {
      step();
      multiply_rows<Block>(rows, tile, a, acc);
    }
    if (piece == last) break;
    ++piece;
  }
}

}  // namespace xopt::XOPT_ISA
