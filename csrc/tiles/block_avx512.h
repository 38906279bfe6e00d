// Blocks at level `avx512` and above: up to 14 rows x 32 columns in registers (28 accumulators, 2 of weight, 1 of A).
//
// Each k costs two loads of weight, which come from L2, and one broadcast a row, which comes from L1: the FMA ports are what
// is busy.
#pragma once

#include "tiles/block.h"
#include "tiles/block_rows.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
#ifdef XOPT_EMULATE
#include "tiles/emulate.h"
#endif

namespace xopt::XOPT_ISA {

// A value of A times two vectors of weights, by the instruction named OP. In a register of its own: 28 sums, 2 vectors of
// weights and what unpacks those leave one of 32, and where GCC is free to load the next row's x beside this one's, it keeps
// sums on the stack instead.
//
// Products that load x themselves would be one instruction less, and on Granite Rapids 7% slower (csrc/README.md).
#define XOPT_MULTIPLY_TWO(OP, x, w, sum0, sum1)                                               \
  asm volatile("vbroadcastss %2, %%zmm31\n\t" OP " %%zmm31, %3, %0\n\t" OP " %%zmm31, %4, %1" \
               : "+&v"(sum0), "+v"(sum1)                                                      \
               : "m"(x), "v"((w)[0]), "v"((w)[1])                                             \
               : "xmm31")

// Products of floats.
struct FloatProducts {
  using A = float;
  // Sums of this many products, added up: one chain of all would round three times as badly where K is in the thousands.
  static constexpr int64_t kChain = 128;
  static XOPT_INLINE void multiply(const RowValue& x, F w, F& sum) { sum = fma(set1(x), w, sum); }
  static XOPT_INLINE void multiply(const RowValue& x, const F (&w)[2], F& sum0, F& sum1) {
    XOPT_MULTIPLY_TWO("vfmadd231ps", x, w, sum0, sum1);
  }
};

// How 16 columns of one k become a vector, which is the g-th of its row, and how they are multiplied.
struct WeightF32 : FloatProducts {
  using Round = float;
  static constexpr DType kDType = DType::f32;
  static constexpr int kGroup = 1;
  static XOPT_INLINE F get(const uint8_t* row, int) { return _mm512_loadu_ps(row); }
};
struct WeightBf16 : FloatProducts {
  using Round = Bf16;
  static constexpr DType kDType = DType::bf16;
  static constexpr int kGroup = 2;
  static XOPT_INLINE F get(const uint8_t* row, int g) {
    const __m512i pair = _mm512_loadu_si512(row);
    return _mm512_castsi512_ps(g == 0 ? _mm512_slli_epi32(pair, 16)
                                      : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
  }
};
struct WeightF16 : FloatProducts {
  using Round = F16;
  static constexpr DType kDType = DType::f16;
  static constexpr int kGroup = 2;
  static XOPT_INLINE F get(const uint8_t* row, int g) {
    const __m512i pair = _mm512_loadu_si512(row);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(g == 0 ? pair : _mm512_srli_epi32(pair, 16)));
  }
};

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
// Pairs of bf16 along k, which stay what they are.
struct WeightPairs {
  using A = Bf16;
  using Round = Bf16;
  static constexpr DType kDType = DType::bf16;
  static constexpr int kGroup = 1;
  static constexpr int64_t kChain = 768;
  static XOPT_INLINE F get(const uint8_t* row, int) { return _mm512_loadu_ps(row); }
#ifdef XOPT_EMULATE
  static XOPT_INLINE void multiply(const RowValue& x, F w, F& sum) {
    sum = emulated_dpbf16(sum, _mm512_castps_si512(set1(x)), _mm512_castps_si512(w));
  }
  static XOPT_INLINE void multiply(const RowValue& x, const F (&w)[2], F& sum0, F& sum1) {
    multiply(x, w[0], sum0);
    multiply(x, w[1], sum1);
  }
#else
  // Not the intrinsic: GCC 12 copies its accumulator before each product and spills half of them.
  static XOPT_INLINE void multiply(const RowValue& x, F w, F& sum) {
    asm("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(x), "v"(w));
  }
  static XOPT_INLINE void multiply(const RowValue& x, const F (&w)[2], F& sum0, F& sum1) {
    XOPT_MULTIPLY_TWO("vdpbf16ps", x, w, sum0, sum1);
  }
#endif
};
#endif
#undef XOPT_MULTIPLY_TWO

// The weights of two steps later into L1: 5% more than waiting for L2 on a core whose reorder buffer is short or shared.
// One step is too late for what comes from L3 (2% on Zen 5, 1% on Emerald Rapids); four are no better.
template <int Tiles = 2>
XOPT_INLINE void prefetch_step(const uint8_t* b) {
  __builtin_prefetch(b + 4 * kTileBytes, 0, 3);
  if (Tiles == 2) __builtin_prefetch(b + 5 * kTileBytes, 0, 3);
}

// Sums of floats in registers, which become output there where the epilogue is simple.
template <class Weight>
struct FmaBlock {
  using A = typename Weight::A;
  using Acc = float;
  using Round = typename Weight::Round;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 14;
  // Of a line of outputs. Seven rows multiply as fast as 14 do: 14 sums are more than are under way at a time.
  static constexpr int64_t kLeastLineRows = 7;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = true;
  static constexpr DType kFinishedDType = Weight::kDType;
  static constexpr int64_t kValuesOf4Bytes = 4 / static_cast<int64_t>(sizeof(A));
  static constexpr int64_t kTileK = kTileRows * Weight::kGroup * kValuesOf4Bytes;
  static constexpr int64_t kMaxTiles = 384 / (kTileRows * Weight::kGroup);
  static constexpr int64_t kStride = (384 + 16) * kValuesOf4Bytes;
  static constexpr int32_t kOffset = 0;
  static constexpr int64_t kChainTiles = Weight::kChain / kTileK;
  // Rows of a tile. More would not stay in the cache of decoded instructions.
  static constexpr int kUnrolled = kTileRows / Weight::kGroup;
  struct Scope {};
  template <int R>
  using ARows = BlockRows<R>;

  template <int R, class Between>
  static void block(const BlockCall& call, Between& between) {
    const auto* finish = static_cast<const Finish<Round>*>(call.finish);
    if (call.columns <= kTileColumns || call.diagonal != 0) {
      for (int64_t column = 0; column < call.columns; column += kTileColumns) {
        multiply<R, 1>(call, finish, column, between);
      }
    } else {
      multiply<R, 2>(call, finish, 0, between);
    }
    if (call.k_tiles == 0 && !call.accumulate) __builtin_memset(call.acc, 0, R * kPanelColumns * sizeof(float));
  }

  // V tiles of the panel's columns.
  template <int R, int V, class Between>
  static XOPT_INLINE void multiply(const BlockCall& call, const Finish<Round>* finish, int64_t column,
                                   Between& between) {
    for (int64_t begin = 0, end; begin < call.k_tiles; begin = end) {
      end = chain_end<FmaBlock>(call, begin);
      F acc[V][R];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) acc[v][r] = set1(0.0F);
      }
      multiply_tiles<FmaBlock, kUnrolled>(call, begin, end, column, acc, [&] { between.step(); });
      float* sums = static_cast<float*>(call.acc) + column;
      asm("" : "+r"(sums));  // GCC would keep each row's address on the stack
      if (begin > 0 || call.accumulate) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
#pragma GCC unroll 14
          for (int r = 0; r < R; ++r) acc[v][r] = add(load(sums + r * kPanelColumns + kWidth * v), acc[v][r]);
        }
      }
      const bool finished = end == call.k_tiles && finish != nullptr;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        if (finished) {
          finish_rows(*finish, column + kWidth * v, acc[v]);
        } else {
#pragma GCC unroll 14
          for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns + kWidth * v, acc[v][r]);
        }
      }
    }
  }

  template <int First, int Rest, int R, int V>
  static XOPT_INLINE void multiply_k(const uint8_t* b, const ARows<R>& a, int row, F (&acc)[V][R]) {
    prefetch_step<V>(b);
#pragma GCC unroll 2
    for (int g = 0; g < Weight::kGroup; ++g) {
      F w[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) w[v] = Weight::get(b + v * kTileBytes, g);
#pragma GCC unroll 14
      for (int r = First; r < R - Rest; ++r) {
        const RowValue& x = a.at(r, row * Weight::kGroup + g);
        if constexpr (V == 2) {
          Weight::multiply(x, w, acc[0][r], acc[1][r]);
        } else {
          Weight::multiply(x, w[0], acc[0][r]);
        }
      }
    }
  }
  XOPT_RUN_ROWS_ELSEWHERE
};

// Products of u8 x s8 quadruples.
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
