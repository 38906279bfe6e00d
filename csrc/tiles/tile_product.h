// Short products of tiles that follow each other, with something else to do after each instruction that multiplies.
//
// Between two products of two steps along k lies as much time as they take (240 cycles for each 32 x 32, of which 128 are
// products), if sums are stored at once: stores wait for the last product, and the next for registers. So sums stay in
// their tiles until the next product wants these, one after the other.
#pragma once

#include "tiles/amx.h"
#include "tiles/layout.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// Tile loads do not say that they read memory.
XOPT_INLINE void tile_barrier() { asm volatile("" ::: "memory"); }

// 32 or 16 rows of bf16 times up to 32 columns of a packed panel.
struct TileProduct {
  const uint8_t* rows;
  int64_t row_bytes;           // from a row to the next
  int64_t step_bytes;          // from rows of a step along k to those of the next
  const uint8_t* panel;        // 2 KB for each step along k
  int64_t k_tiles;             // at least 1
  float* sums;                 // rows of 32
  bool accumulate;             // add to what is there
  int64_t row_count, columns;  // that are wanted
};

class TileProducts {
 public:
  // Sums are there after the next product, or finish(). Calls between.step() after each instruction.
  template <class Between>
  XOPT_INLINE void run(const TileProduct& product, Between& between) {
    tile_barrier();
    if (product.row_count <= kTileRows) {
      Between copy = between;
      one_row_tile(product, copy);
      between = copy;
    } else if (product.columns <= kTileColumns) {
      multiply<true, false>(product, between);
    } else {
      multiply<true, true>(product, between);
    }
    tile_barrier();
  }

  void finish() {
    if (kept_ == nullptr) return;
    XOPT_TILE_STORE(0, kept_, kSumBytes);
    if (has_columns_) XOPT_TILE_STORE(1, kept_ + kRight, kSumBytes);
    if (has_rows_) XOPT_TILE_STORE(2, kept_ + kBelow, kSumBytes);
    if (has_rows_ && has_columns_) XOPT_TILE_STORE(3, kept_ + kBelow + kRight, kSumBytes);
    kept_ = nullptr;
    has_rows_ = has_columns_ = false;
    tile_barrier();
  }

 private:
  // Of sums: tiles 0 and 1, and below them 2 and 3, as far as there are two rows of tiles and two columns.
  static constexpr int64_t kSumBytes = kPanelColumns * 4, kRight = kTileColumns, kBelow = kTileRows * kPanelColumns;

// A tile of sums is stored if it is kept, and begins anew.
#define XOPT_BEGIN(C, KEPT, PLACE)                            \
  do {                                                        \
    if (KEPT) XOPT_TILE_STORE(C, kept_ + (PLACE), kSumBytes); \
    if (product.accumulate) {                                 \
      XOPT_TILE_LOAD(C, product.sums + (PLACE), kSumBytes);   \
    } else {                                                  \
      XOPT_TILE_ZERO(C);                                      \
    }                                                         \
  } while (false)

  // By itself, and with a copy of what is else in registers: few rows are rare.
  template <class Between>
  [[gnu::noinline]] void one_row_tile(const TileProduct& product, Between& between) {
    product.columns <= kTileColumns ? multiply<false, false>(product, between)
                                    : multiply<false, true>(product, between);
  }

  template <bool TwoRows, bool TwoColumns, class Between>
  XOPT_INLINE void multiply(const TileProduct& product, Between& between) {
    const int64_t row_bytes = product.row_bytes;
    const uint8_t *a = product.rows, *b = product.panel;
    step<true, TwoRows, TwoColumns>(product, a, b, row_bytes, between);
    if (!TwoColumns && has_columns_) XOPT_TILE_STORE(1, kept_ + kRight, kSumBytes);
    if (!TwoRows && has_rows_) XOPT_TILE_STORE(2, kept_ + kBelow, kSumBytes);
    if (!(TwoRows && TwoColumns) && has_rows_ && has_columns_) XOPT_TILE_STORE(3, kept_ + kBelow + kRight, kSumBytes);
    for (int64_t k = 1; k < product.k_tiles; ++k) {
      a += product.step_bytes;
      b += 2 * kTileBytes;
      step<false, TwoRows, TwoColumns>(product, a, b, row_bytes, between);
    }
    kept_ = product.sums;
    has_rows_ = TwoRows;
    has_columns_ = TwoColumns;
  }

  template <bool First, bool TwoRows, bool TwoColumns, class Between>
  XOPT_INLINE void step(const TileProduct& product, const uint8_t* a, const uint8_t* b, int64_t row_bytes,
                        Between& between) {
    XOPT_TILE_STREAM(6, b, 64);
    XOPT_TILE_LOAD(4, a, row_bytes);
    if constexpr (First) XOPT_BEGIN(0, kept_ != nullptr, 0);
    XOPT_TILE_DOT_BF16(0, 4, 6);
    between.step();
    if constexpr (TwoRows) {
      XOPT_TILE_LOAD(5, a + kTileRows * row_bytes, row_bytes);
      if constexpr (First) XOPT_BEGIN(2, has_rows_, kBelow);
      XOPT_TILE_DOT_BF16(2, 5, 6);
      between.step();
    }
    XOPT_TILE_ZERO(6);  // a tile that is zero takes no register from others (block_amx.h)
    if constexpr (TwoColumns) {
      XOPT_TILE_STREAM(7, b + kTileBytes, 64);
      if constexpr (First) XOPT_BEGIN(1, has_columns_, kRight);
      XOPT_TILE_DOT_BF16(1, 4, 7);
      between.step();
    }
    XOPT_TILE_ZERO(4);
    if constexpr (TwoRows && TwoColumns) {
      if constexpr (First) XOPT_BEGIN(3, has_rows_ && has_columns_, kBelow + kRight);
      XOPT_TILE_DOT_BF16(3, 5, 7);
      between.step();
    }
    XOPT_TILE_ZERO(5);
    XOPT_TILE_ZERO(7);
  }
#undef XOPT_BEGIN

  float* kept_ = nullptr;  // where the sums in tiles belong
  bool has_rows_ = false, has_columns_ = false;
};

}  // namespace xopt::XOPT_ISA
#endif
