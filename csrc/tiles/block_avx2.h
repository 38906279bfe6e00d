// Blocks at level `avx2`: 16 registers hold 6 rows x 16 columns of fp32, so a panel is done in two halves.
#pragma once

#include "tiles/block.h"
#include "tiles/block_rows.h"

#if XOPT_LEVEL == XOPT_LEVEL_AVX2
namespace xopt::XOPT_ISA {

// How 8 columns of one k become a vector: `half` is the 8-column half of a tile row, g the k within the group.
struct WeightF32 {
  using Round = float;
  static constexpr DType kDType = DType::f32;
  static constexpr int kGroup = 1;
  static XOPT_INLINE F get(const uint8_t* row, int half, int) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(row + 32 * half));
  }
};
struct WeightBf16 {
  using Round = Bf16;
  static constexpr DType kDType = DType::bf16;
  static constexpr int kGroup = 2;
  static XOPT_INLINE F get(const uint8_t* row, int half, int g) {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 32 * half));
    return _mm256_castsi256_ps(g == 0 ? _mm256_slli_epi32(pair, 16)
                                      : _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
  }
};
struct WeightF16 {
  using Round = F16;
  static constexpr DType kDType = DType::f16;
  static constexpr int kGroup = 2;
  static XOPT_INLINE F get(const uint8_t* row, int half, int g) {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 32 * half));
    const __m256i word = g == 0 ? _mm256_and_si256(pair, _mm256_set1_epi32(0xffff)) : _mm256_srli_epi32(pair, 16);
    return _mm256_cvtph_ps(pack_words(word));
  }
};

template <class Weight>
struct FmaBlock {
  using A = float;
  using Acc = float;
  using Round = typename Weight::Round;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 6;
  // Of a line of outputs. With four, 1280 channels of 8 x 8 took 1.07 times as long as with patches and their zeros.
  static constexpr int64_t kLeastLineRows = 5;
  static constexpr bool kBackground = false;
  static constexpr bool kEvenRows = true;
  static constexpr bool kFinishes = true;
  static constexpr DType kFinishedDType = Weight::kDType;
  static constexpr int64_t kTileK = kTileRows * Weight::kGroup;
  static constexpr int64_t kMaxTiles = 384 / kTileK;
  static constexpr int64_t kStride = 384 + 16;
  static constexpr int32_t kOffset = 0;
  static constexpr int64_t kChainTiles = 128 / kTileK;  // for accuracy, as in block_avx512.h
  static constexpr int kUnrolled = 4;                   // rows of a tile
  struct Scope {};
  template <int R>
  using ARows = BlockRows<R>;

  template <int R, class Between>
  static void block(const BlockCall& call, Between& between) {
    const auto* finish = static_cast<const Finish<Round>*>(call.finish);
    // One row or two: weights come from memory, in their order there, and half a panel has too few sums under way.
    constexpr int kVectors = R <= 2 ? 4 : 2;
    if constexpr (R > 3) {
      if (call.pieces == nullptr && call.columns > 3 * kWidth && call.k_tiles > 0)
        return panel<R>(call, finish, between);
    }
    for (int64_t done = 0, end; done < call.k_tiles; done = end) {
      end = chain_end<FmaBlock>(call, done);
      const int64_t most = call.diagonal != 0 ? call.diagonal : kVectors * kWidth;
      for (int64_t column = 0; column < call.columns; column += most) {
        const int64_t rest = minimum(most, call.columns - column);
        if (rest > kVectors / 2 * kWidth) {
          multiply<R, kVectors>(call, finish, column, done, end, between);
        } else if (kVectors > 2 && rest > kWidth) {
          multiply<R, 2>(call, finish, column, done, end, between);
        } else {
          multiply<R, 1>(call, finish, column, done, end, between);
        }
      }
    }
    if (call.k_tiles == 0 && !call.accumulate) __builtin_memset(call.acc, 0, R * kPanelColumns * sizeof(float));
  }

  // All columns, of rows that are no pieces, which is what long products are made of. What multiply() looks up for each half
  // of a chain is a hundred instructions more than here: beside a busy hyperthread 1 to 3% of the time.
  template <int R, class Between>
  static void panel(const BlockCall& call, const Finish<Round>* finish, Between& between) {
    ARows<R> rows(call, kStride * static_cast<int64_t>(sizeof(A)));
    const uint8_t* b = call.b;
    for (int64_t done = 0, end; done < call.k_tiles; done = end) {
      end = minimum(done + kChainTiles, call.k_tiles);
      const int64_t rest = end == call.k_tiles && call.last_rows < kTileRows ? call.last_rows : 0;
      const int64_t bytes = (end - done - (rest > 0 ? 1 : 0)) * 2 * kTileBytes;
      const auto* last = end == call.k_tiles ? finish : nullptr;
#pragma GCC unroll 1
      for (int64_t half = 0; half < 2; ++half) {
        F acc[2][R];
        clear_sums(acc);
        ARows<R> a = rows;
        const uint8_t* tile = b + half * kTileBytes;
        for (const uint8_t* stop = tile + bytes; tile != stop; tile += 2 * kTileBytes) {
          if (half == 0) between.step();
          multiply_tile<FmaBlock, kUnrolled>(tile, a, acc);
        }
        if (rest > 0) multiply_rows<FmaBlock>(rest, tile, a, acc);
        end_chain(call, last, half * kTileColumns, done > 0 || call.accumulate, acc);
      }
      b += bytes;
      rows.advance(bytes / (2 * kTileBytes) * kTileRows * kBytesOfRow<FmaBlock>);
    }
  }

  template <int First, int Rest, int R, int V>
  static XOPT_INLINE void multiply_k(const uint8_t* b, const ARows<R>& a, int row, F (&acc)[V][R]) {
    // The half's next tile, into L1: the other half lies between, and the processor's prefetcher stops there.
    if (V <= 2) __builtin_prefetch(b + 2 * kTileBytes);
#pragma GCC unroll 2
    for (int g = 0; g < Weight::kGroup; ++g) {
      F w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = Weight::get(b + v / 2 * kTileBytes, v % 2, g);
#pragma GCC unroll 6
      for (int r = First; r < R - Rest; ++r) multiply_row(a.at(r, row * Weight::kGroup + g), w, r, acc);
    }
  }

  // Adds a row's x times w. In a register of its own: 12 sums, 2 vectors of weights and what unpacks those leave one of
  // 16, and where GCC is free to load the next row's x beside this one's, it keeps sums on the stack instead. Each of
  // their products then waits for a store and a load, which takes twice the time of all others together.
  template <int R, int V>
  static XOPT_INLINE void multiply_row(const RowValue& x, const F (&w)[V], int r, F (&acc)[V][R]) {
    if constexpr (V == 2) {
      asm volatile("vbroadcastss %2, %%ymm15\n\tvfmadd231ps %3, %%ymm15, %0\n\tvfmadd231ps %4, %%ymm15, %1"
                   : "+&x"(acc[0][r]), "+x"(acc[1][r])
                   : "m"(x), "x"(w[0]), "x"(w[1])
                   : "xmm15");
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[v][r] = fma(set1(x), w[v], acc[v][r]);
    }
  }

  // V vectors of columns from `column` on, over the tiles [begin, end) along k.
  template <int R, int V, class Between>
  static XOPT_INLINE void multiply(const BlockCall& call, const Finish<Round>* finish, int64_t column, int64_t begin,
                                   int64_t end, Between& between) {
    F acc[V][R];
    clear_sums(acc);
    multiply_tiles<FmaBlock, kUnrolled>(call, begin, end, column, acc, [&] {
      if (column == 0 || call.diagonal != 0) between.step();
    });
    end_chain(call, end == call.k_tiles ? finish : nullptr, column, begin > 0 || call.accumulate, acc);
  }

  template <int R, int V>
  static XOPT_INLINE void clear_sums(F (&acc)[V][R]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) acc[v][r] = set1(0.0F);
    }
  }

  // Adds the sums of the chains before, and finishes what that is, or keeps it for the next.
  template <int R, int V>
  static XOPT_INLINE void end_chain(const BlockCall& call, const Finish<Round>* finish, int64_t column, bool accumulate,
                                    F (&acc)[V][R]) {
    float* sums = static_cast<float*>(call.acc) + column;
    asm("" : "+r"(sums));  // GCC would keep each row's address on the stack
    if (accumulate) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) acc[v][r] = add(load(sums + r * kPanelColumns + kWidth * v), acc[v][r]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int64_t first = column + kWidth * v;
      if (finish == nullptr) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) store(sums + r * kPanelColumns + kWidth * v, acc[v][r]);
      } else if (V <= 2 || first < call.columns) {
        finish_rows(*finish, first, acc[v]);
      }
    }
  }
  XOPT_RUN_ROWS_ELSEWHERE
};

// int8 through 16-bit products: vpmaddubsw would saturate. A product of 4 columns holds 2 partial sums of each, which are
// added up at the end.
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
    for (int quarter = 0; quarter < 4; ++quarter) quarter_block<R>(call, quarter, between);
  }

  // Adds a row's products to its sums. As for floats all 16 registers are spoken for.
  template <int R>
  static XOPT_INLINE void multiply_row(const A& x, const __m256i (&w)[2], int r, __m256i (&acc)[R][2]) {
    asm volatile(
        "vpbroadcastq %2, %%ymm15\n\tvpmaddwd %3, %%ymm15, %%ymm14\n\tvpaddd %%ymm14, %0, %0\n\t"
        "vpmaddwd %4, %%ymm15, %%ymm15\n\tvpaddd %%ymm15, %1, %1"
        : "+x"(acc[r][0]), "+x"(acc[r][1])
        : "m"(reinterpret_cast<const A(&)[4]>(x)), "x"(w[0]), "x"(w[1])
        : "xmm14", "xmm15");
  }

  // 8 columns.
  template <int R, class Between>
  static XOPT_INLINE void quarter_block(const BlockCall& call, int quarter, Between& between) {
    const auto* a = static_cast<const A*>(call.a);
    const uint8_t* b = call.b + kTileBytes * (quarter / 2) + 32 * (quarter % 2);
    __m256i acc[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (int64_t t = 0; t < call.k_tiles; ++t, a += kTileK, b += kTileBytes) {
      if (quarter == 0) between.step();
      const A* group = a;
      for (int j = 0; j < kTileRows; ++j, b += 64, group += 4) {
        __builtin_prefetch(b + 2 * kTileBytes);
        __m256i w[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          w[v] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * v)));
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) multiply_row(group[r * kStride], w, r, acc);
      }
    }
    int32_t* out = static_cast<int32_t*>(call.acc) + 8 * quarter;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256i pairs = _mm256_hadd_epi32(acc[r][0], acc[r][1]);
      __m256i sum = _mm256_permute4x64_epi64(pairs, 0xd8);
      auto* to = reinterpret_cast<__m256i*>(out + r * kPanelColumns);
      if (call.accumulate) sum = _mm256_add_epi32(sum, _mm256_loadu_si256(to));
      _mm256_storeu_si256(to, sum);
    }
  }
  XOPT_RUN_ROWS(6)
};

}  // namespace xopt::XOPT_ISA
#endif
