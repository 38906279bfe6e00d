// The product of a row block with a panel of fp32, as FmaBlock has it, but over k values and columns that need not fill
// tiles: heads of 40 or 80 columns and 77 or 197 keys would pay for a fifth of padding.
#pragma once

#include "tiles/block.h"

namespace xopt::XOPT_ISA {

// `call.k_tiles` counts values of k here. Halves: 16 columns each.
template <class Block, int Halves>
struct ExactProduct {
  static constexpr int kHalfVectors = kTileColumns / kWidth;
  static constexpr int kVectors = Halves * kHalfVectors;

  template <int R, class Between>
  static void block(const BlockCall& call, Between&) {
    const auto* a = static_cast<const float*>(call.a);
    const auto* b = reinterpret_cast<const float*>(call.b);
    auto* out = static_cast<float*>(call.acc);
    F acc[R][kVectors];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = call.accumulate ? load(out + r * kPanelColumns + v * kWidth) : set1(0.0F);
      }
    }
    for (int64_t left = call.k_tiles; left > 0; left -= kTileRows, a += kTileRows, b += 2 * kTileBytes / 4) {
      const int64_t count = minimum(kTileRows, left);
      for (int64_t k = 0; k < count; ++k) {
        const float* weights = b + k * kTileColumns;
        F weight[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const float* half = weights + v / kHalfVectors * kTileBytes / 4;
          __builtin_prefetch(half + 2 * kTileBytes / 4, 0, 3);
          weight[v] = load(half + v % kHalfVectors * kWidth);
        }
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          const F x = set1(a[r * Block::kStride + k]);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, weight[v], acc[r][v]);
        }
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(out + r * kPanelColumns + v * kWidth, acc[r][v]);
    }
  }
  XOPT_RUN_ROWS(Block::kRows)
};

}  // namespace xopt::XOPT_ISA
