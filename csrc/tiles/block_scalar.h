// Blocks at level `scalar`, and of dtypes that a level has nothing better for.
#pragma once

#include "tiles/block.h"

namespace xopt::XOPT_ISA {

// Weight element W, copy of A in T, accumulator Acc.
template <class W, class T, class AccType, class RoundType>
struct ScalarBlock {
  using A = T;
  using Acc = AccType;
  using Round = RoundType;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 4;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = false;
  static constexpr int64_t kGroup = 4 / static_cast<int64_t>(sizeof(W));
  static constexpr int64_t kTileK = kTileRows * kGroup;
  static constexpr int64_t kMaxTiles = 1024 / kTileK;
  static constexpr int64_t kStride = 1024 + 64 / static_cast<int64_t>(sizeof(T));
  static constexpr int32_t kOffset = 0;
  struct Scope {};

  static AccType value(const float* w) { return *w; }
  static AccType value(const int8_t* w) { return *w; }
  template <class Half>
  static AccType value(const Half* w) {
    return load(w);
  }

  template <class Between>
  static void run(int64_t rows, const BlockCall& call, Between&) {
    auto* acc = static_cast<AccType*>(call.acc);
    const auto* b = reinterpret_cast<const W*>(call.b);
    const auto* a = static_cast<const A*>(call.a);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t n = 0; n < kPanelColumns; ++n) {
        const int64_t tile = n / kTileColumns * (kTileBytes / sizeof(W)) + n % kTileColumns * kGroup;
        AccType sum = call.accumulate ? acc[row * kPanelColumns + n] : AccType(0);
        for (int64_t k = 0; k < call.k_tiles * kTileK; ++k) {
          const int64_t step = k / kTileK * (2 * kTileBytes / sizeof(W)) + k % kTileK / kGroup * kTileColumns * kGroup;
          sum += static_cast<AccType>(a[row * kStride + k]) * value(b + step + tile + k % kGroup);
        }
        acc[row * kPanelColumns + n] = sum;
      }
    }
  }
};

}  // namespace xopt::XOPT_ISA
