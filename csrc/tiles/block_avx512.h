// Blocks at level `avx512` and above: up to 14 rows x 32 columns in registers (28 accumulators, 2 of weight, 1 of A).
//
// Each k costs two loads of weight, which come from L2, and one broadcast a row, which comes from the copy of A in L1
// whose row distance is a constant, so that all rows are addressed from one pointer: the FMA ports are what is busy.
#pragma once

#include "tiles/block.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
#ifdef XOPT_EMULATE
#include "tiles/emulate.h"
#endif

namespace xopt::XOPT_ISA {

// How 16 columns of one k become a vector; g is the k within the group.
struct WeightF32 {
  using Round = float;
  static constexpr int kGroup = 1;
  static constexpr int kRows = 14;
  static XOPT_INLINE F get(const uint8_t* row, int) { return _mm512_loadu_ps(row); }
};
struct WeightBf16 {
  using Round = Bf16;
  static constexpr int kGroup = 2;
  static constexpr int kRows = 14;
  static XOPT_INLINE F get(const uint8_t* row, int g) {
    const __m512i pair = _mm512_loadu_si512(row);
    return _mm512_castsi512_ps(g == 0 ? _mm512_slli_epi32(pair, 16)
                                      : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }
};
struct WeightF16 {
  using Round = F16;
  static constexpr int kGroup = 2;
  static constexpr int kRows = 14;
  static XOPT_INLINE F get(const uint8_t* row, int g) {
    const __m512i pair = _mm512_loadu_si512(row);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(g == 0 ? pair : _mm512_srli_epi32(pair, 16)));
  }
};

// The weights of a tile later into L1: 5% more than waiting for L2 on a core whose reorder buffer is short or shared.
XOPT_INLINE void prefetch_step(const uint8_t* b) {
  __builtin_prefetch(b + 2 * kTileBytes, 0, 3);
  __builtin_prefetch(b + 3 * kTileBytes, 0, 3);
}

template <class Weight>
struct FmaBlock {
  using A = float;
  using Acc = float;
  using Round = typename Weight::Round;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = Weight::kRows;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = false;
  static constexpr int64_t kTileK = kTileRows * Weight::kGroup;
  static constexpr int64_t kMaxTiles = 384 / kTileK;
  static constexpr int64_t kStride = 384 + 16;
  static constexpr int32_t kOffset = 0;
  // Sums of this many products, added up: one chain of all would round three times as badly where K is in the thousands.
  static constexpr int64_t kChainTiles = 128 / kTileK;
  struct Scope {};

  template <int R, class Between>
  static void block(const BlockCall& call, Between& between) {
    const auto* a = static_cast<const float*>(call.a);
    auto* out = static_cast<float*>(call.acc);
    const uint8_t* b = call.b;
    for (int64_t done = 0; done < call.k_tiles; done += kChainTiles) {
      F acc[R][2];
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) acc[r][v] = set1(0.0F);
      }
      const int64_t tiles = minimum(kChainTiles, call.k_tiles - done);
      for (int64_t t = 0; t < tiles; ++t, b += 2 * kTileBytes, a += kTileK) {
        between.step();
        for (int j = 0; j < kTileRows; ++j) {
          prefetch_step(b + 64 * j);
          for (int g = 0; g < Weight::kGroup; ++g) {
            const F b0 = Weight::get(b + 64 * j, g), b1 = Weight::get(b + kTileBytes + 64 * j, g);
#pragma GCC unroll 14
            for (int r = 0; r < R; ++r) {
              const F x = set1(a[r * kStride + j * Weight::kGroup + g]);
              acc[r][0] = fma(x, b0, acc[r][0]);
              acc[r][1] = fma(x, b1, acc[r][1]);
            }
          }
        }
      }
      const bool first = done == 0 && !call.accumulate;
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          float* sum = out + r * kPanelColumns + 16 * v;
          store(sum, first ? acc[r][v] : add(load(sum), acc[r][v]));
        }
      }
    }
    if (call.k_tiles == 0 && !call.accumulate) __builtin_memset(out, 0, R * kPanelColumns * sizeof(float));
  }
  XOPT_RUN_ROWS(kRows)
};

// Products of whole 4-byte groups: VNNI's u8 x s8 quadruples and BF16's pairs.
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_VNNI
// s8 values of A become u8 by adding 128, which the epilogue takes back with the column sums.
template <class Source, int32_t Offset>
struct DotU8S8 {
  using A = uint8_t;
  using Acc = int32_t;
  using Round = Source;
  static constexpr int32_t kOffset = Offset;
  static XOPT_INLINE void dot(__m512i& acc, __m512i a, __m512i b) {
    // Not the intrinsic: GCC 12 copies its accumulator before each product and spills half of them.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  }
};
#endif
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
struct DotBf16 {
  using A = Bf16;
  using Acc = float;
  using Round = Bf16;
  static constexpr int32_t kOffset = 0;
  static XOPT_INLINE void dot(__m512i& acc, __m512i a, __m512i b) {
#ifdef XOPT_EMULATE
    acc = _mm512_castps_si512(emulated_dpbf16(_mm512_castsi512_ps(acc), a, b));
#else
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // not the intrinsic, as above
#endif
  }
};
#endif

template <class Dot>
struct DotBlock {
  using A = typename Dot::A;
  using Acc = typename Dot::Acc;
  using Round = typename Dot::Round;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 14;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = false;
  static constexpr int64_t kGroup = 4 / static_cast<int64_t>(sizeof(A));
  static constexpr int64_t kTileK = kTileRows * kGroup;
  static constexpr int64_t kMaxTiles = 384 / kTileRows;
  static constexpr int64_t kStride = (384 + 16) * kGroup;
  static constexpr int32_t kOffset = Dot::kOffset;
  struct Scope {};

  template <int R, class Between>
  static void block(const BlockCall& call, Between& between) {
    const auto* a = static_cast<const A*>(call.a);
    auto* out = static_cast<int32_t*>(call.acc);
    const uint8_t* b = call.b;
    __m512i acc[R][2];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        acc[r][v] = call.accumulate ? _mm512_loadu_si512(out + r * kPanelColumns + 16 * v) : _mm512_setzero_si512();
      }
    }
    for (int64_t t = 0; t < call.k_tiles; ++t, b += 2 * kTileBytes, a += kTileK) {
      between.step();
      for (int j = 0; j < kTileRows; ++j) {
        prefetch_step(b + 64 * j);
        const __m512i b0 = _mm512_loadu_si512(b + 64 * j), b1 = _mm512_loadu_si512(b + kTileBytes + 64 * j);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          int group;
          __builtin_memcpy(&group, a + r * kStride + j * kGroup, 4);
          const __m512i x = _mm512_set1_epi32(group);
          Dot::dot(acc[r][0], x, b0);
          Dot::dot(acc[r][1], x, b1);
        }
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) _mm512_storeu_si512(out + r * kPanelColumns + 16 * v, acc[r][v]);
    }
  }
  XOPT_RUN_ROWS(kRows)
};

// int8 without VNNI: 16-bit products, exact, a register holding 8 columns x 2 partial sums.
template <class Source>
struct Int8Block {
  using A = int16_t;
  using Acc = int32_t;
  using Round = Source;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 6;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = false;
  static constexpr int64_t kTileK = kTileRows * 4;
  static constexpr int64_t kMaxTiles = 768 / kTileK;
  static constexpr int64_t kStride = 768 + 32;
  static constexpr int32_t kOffset = 0;
  struct Scope {};

  template <int R, class Between>
  static void block(const BlockCall& call, Between& between) {
    const auto* a = static_cast<const A*>(call.a);
    auto* out = static_cast<int32_t*>(call.acc);
    __m512i acc[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[r][v] = _mm512_setzero_si512();
    }
    const uint8_t* b = call.b;
    for (int64_t t = 0; t < call.k_tiles; ++t, b += 2 * kTileBytes, a += kTileK) {
      between.step();
      for (int j = 0; j < kTileRows; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const uint8_t* from = b + v / 2 * kTileBytes + 64 * j + 32 * (v % 2);
          const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            long long group;
            __builtin_memcpy(&group, a + r * kStride + 4 * j, 8);
            acc[r][v] = _mm512_add_epi32(acc[r][v], _mm512_madd_epi16(_mm512_set1_epi64(group), w));
          }
        }
      }
    }
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m512i sum = _mm512_add_epi32(_mm512_permutex2var_epi32(acc[r][2 * v], even, acc[r][2 * v + 1]),
                                       _mm512_permutex2var_epi32(acc[r][2 * v], odd, acc[r][2 * v + 1]));
        int32_t* to = out + r * kPanelColumns + 16 * v;
        if (call.accumulate) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(to));
        _mm512_storeu_si512(to, sum);
      }
    }
  }
  XOPT_RUN_ROWS(kRows)
};

}  // namespace xopt::XOPT_ISA
#endif
