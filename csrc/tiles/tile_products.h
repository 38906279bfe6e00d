// Short products of tiles that follow each other, with something else to do after each instruction that multiplies.
//
// Between two products of two steps along k lies as much time as they take (240 cycles for each 32 x 32, of which 128 are
// products), if sums are stored at once: stores wait for the last product, and the next for registers. So sums stay in
// their tiles until the next product wants these, one after the other (557 cycles for seven products of attention's in a bare
// loop on Granite Rapids, 734 if at once, 448 the instructions alone). Whether there are any is not asked: the first product
// stores what is in the tiles nowhere.
#pragma once

#include "tiles/amx.h"
#include "tiles/layout.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// Tile loads do not say that they read memory.
XOPT_INLINE void tile_barrier() { asm volatile("" ::: "memory"); }

// 32 rows of bf16 times 32 columns of a packed panel, or the first 16.
struct TileProduct {
  const uint8_t* rows;
  int64_t row_bytes;     // from a row to the next
  int64_t step_bytes;    // from rows of a step along k to those of the next
  const uint8_t* panel;  // 2 KB for each step along k
  int64_t k_tiles;       // at least 1
  float* sums;           // rows of 32
  bool accumulate;       // add to what is there
};

class TileProducts {
 public:
  static constexpr int64_t kSums = 2 * kTileRows * kPanelColumns;  // of a product

  // `nowhere`: room for kSums, for whatever.
  explicit TileProducts(float* nowhere) : nowhere_(nowhere), kept_(nowhere) {}

  // Sums are there after the next product, or finish(). Calls between.step() after each instruction.
  template <bool TwoColumns, class Between>
  XOPT_INLINE void run(const TileProduct& product, Between& between) {
    tile_barrier();
    const int64_t row_bytes = product.row_bytes;
    const uint8_t *a = product.rows, *b = product.panel;
    step<true, TwoColumns>(product, a, b, row_bytes, between);
    for (int64_t k = 1; k < product.k_tiles; ++k) {
      a += product.step_bytes;
      b += 2 * kTileBytes;
      step<false, TwoColumns>(product, a, b, row_bytes, between);
    }
    kept_ = product.sums;
    keeps_columns_ = TwoColumns;
    tile_barrier();
  }

  void finish() {
    if (kept_ == nowhere_) return;
    XOPT_TILE_STORE(0, kept_, kSumBytes);
    XOPT_TILE_STORE(2, kept_ + kBelow, kSumBytes);
    store_columns();
    kept_ = nowhere_;
    keeps_columns_ = false;
    tile_barrier();
  }

 private:
  // Of sums: tiles 0 and 1, and below them 2 and 3, where there are two columns of tiles.
  static constexpr int64_t kSumBytes = kPanelColumns * 4, kRight = kTileColumns, kBelow = kTileRows * kPanelColumns;

// A tile begins anew.
#define XOPT_BEGIN(C, PLACE)                                \
  do {                                                      \
    if (product.accumulate) {                               \
      XOPT_TILE_LOAD(C, product.sums + (PLACE), kSumBytes); \
    } else {                                                \
      XOPT_TILE_ZERO(C);                                    \
    }                                                       \
  } while (false)

  XOPT_INLINE void store_columns() const {
    if (!keeps_columns_) return;
    XOPT_TILE_STORE(1, kept_ + kRight, kSumBytes);
    XOPT_TILE_STORE(3, kept_ + kBelow + kRight, kSumBytes);
  }

  template <bool First, bool TwoColumns, class Between>
  XOPT_INLINE void step(const TileProduct& product, const uint8_t* a, const uint8_t* b, int64_t row_bytes,
                        Between& between) const {
    XOPT_TILE_STREAM(6, b, 64);
    XOPT_TILE_LOAD(4, a, row_bytes);
    if constexpr (First) {
      XOPT_TILE_STORE(0, kept_, kSumBytes);
      XOPT_BEGIN(0, 0);
    }
    XOPT_TILE_DOT_BF16(0, 4, 6);
    between.step();
    XOPT_TILE_LOAD(5, a + kTileRows * row_bytes, row_bytes);
    if constexpr (First) {
      XOPT_TILE_STORE(2, kept_ + kBelow, kSumBytes);
      XOPT_BEGIN(2, kBelow);
    }
    XOPT_TILE_DOT_BF16(2, 5, 6);
    between.step();
    XOPT_TILE_ZERO(6);  // a tile that is zero takes no register from others (block_amx.h)
    if constexpr (First) store_columns();
    if constexpr (TwoColumns) {
      XOPT_TILE_STREAM(7, b + kTileBytes, 64);
      if constexpr (First) XOPT_BEGIN(1, kRight);
      XOPT_TILE_DOT_BF16(1, 4, 7);
      between.step();
      XOPT_TILE_ZERO(4);
      if constexpr (First) XOPT_BEGIN(3, kBelow + kRight);
      XOPT_TILE_DOT_BF16(3, 5, 7);
      between.step();
      XOPT_TILE_ZERO(7);
    } else {
      XOPT_TILE_ZERO(4);
    }
    XOPT_TILE_ZERO(5);
  }
#undef XOPT_BEGIN

  float* nowhere_;
  float* kept_;  // where the sums in tiles belong
  bool keeps_columns_ = false;
};

}  // namespace xopt::XOPT_ISA
#endif
