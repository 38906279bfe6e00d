// Blocks at level `amx`: 32 rows x 32 columns in four tiles, two tiles of A, two of weight.
//
// Four loads and four products for each k step is the least that 8 tile registers allow. The first two operands of a
// step are loaded during the step before, which hides the latency of weights that come from L2.
//
// Operands are zeroed as soon as they have been used: a tile that is zero occupies no physical register. While another
// hyperthread is busy on the core, only two physical registers are left beside eight tiles in use, and each load or
// product keeps one until it retires, so loads and products hardly overlap: 220 cycles a step from L1, and 128 with
// operands zeroed. (The core alone has enough of them: 55 either way.)
// The row distance of A's copy is an odd number of cache lines, since rows a power of two apart fall into the same sets
// of L1 (measured: a quarter slower). Rows too long for L1 come from L2 like the weights: 64 lines for a step, which is
// just what L2 gives in the time of its products.
#pragma once

#include <type_traits>

#include "tiles/amx.h"
#include "tiles/block.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

struct TileBf16 {
  using A = Bf16;
  using Acc = float;
  using Round = Bf16;
};
template <class Source>
struct TileInt8 {
  using A = Source;
  using Acc = int32_t;
  using Round = Source;
};

// MaxTiles: of A's copy along k.
template <class Kind, int64_t MaxTiles = 16>
struct TileBlock {
  using A = typename Kind::A;
  using Acc = typename Kind::Acc;
  using Round = typename Kind::Round;
  using Scope = TileScope;
  static constexpr bool kIsInt = Acc(0.5) == 0;
  static constexpr int64_t kRows = 32;
  static constexpr bool kBackground = true;
  static constexpr bool kEvenRows = false;
  static constexpr bool kFinishes = false;
  static constexpr int64_t kTileK = kTileRows * 4 / static_cast<int64_t>(sizeof(A));
  static constexpr int64_t kMaxTiles = MaxTiles;
  static constexpr int64_t kStride = kMaxTiles * kTileK + 64 / static_cast<int64_t>(sizeof(A));
  static constexpr int32_t kOffset = 0;

  static_assert(kMaxTiles % 2 == 0, "rows would lie an even number of lines apart");

  // C, A and B are literals at every use: tile numbers are immediates.
#define XOPT_DOT(C, A_, B_)                                        \
  do {                                                             \
    if constexpr (sizeof(A) == 2) {                                \
      XOPT_TILE_DOT_BF16(C, A_, B_);                               \
    } else if constexpr (static_cast<A>(-1) < static_cast<A>(0)) { \
      XOPT_TILE_DOT_S8S8(C, A_, B_);                               \
    } else {                                                       \
      XOPT_TILE_DOT_U8S8(C, A_, B_);                               \
    }                                                              \
  } while (false)

  static XOPT_INLINE void fetch_lines(const uint8_t* from, int64_t lines) {
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * 64, 0, 2);  // into L2
  }

  // The step that comes first, and from each to the next one.
  static int64_t first_step(const BlockCall& call) { return call.backwards ? call.k_tiles - 1 : 0; }
  static int64_t direction(const BlockCall& call) { return call.backwards ? -1 : 1; }

  // Where tiles of A and of weights are, step by step, and what is fetched meanwhile. Which of the two come with the hint not
  // to keep them in L1: weights, unless they stay.
  struct Adjacent {
    static constexpr bool kWeightsStay = false;
    const uint8_t *rows, *b, *ahead;
    const int64_t advance, b_advance, ahead_lines;
    explicit Adjacent(const BlockCall& call)
        : rows(static_cast<const uint8_t*>(call.a) + first_step(call) * 64),
          b(call.b + first_step(call) * 2 * kTileBytes),
          ahead(call.ahead),
          advance(direction(call) * 64),
          b_advance(direction(call) * 2 * kTileBytes),
          ahead_lines(call.ahead_lines) {}
    XOPT_INLINE void next() {
      rows += advance;
      b += b_advance;
    }
    XOPT_INLINE void fetch_ahead() {
      fetch_lines(ahead, ahead_lines);
      ahead += ahead_lines * 64;
    }
  };
  struct Copied : Adjacent {
    static constexpr int64_t stride = kStride * static_cast<int64_t>(sizeof(A));
    using Adjacent::Adjacent;
  };
  struct InRows : Adjacent {
    const int64_t stride;
    explicit InRows(const BlockCall& call) : Adjacent(call), stride(call.a_stride) {}
  };
  // Of rows that pass weights that stay in L1, with the sums of the block after this one.
  template <class Rows>
  struct Passing : Rows {
    static constexpr bool kWeightsStay = true;
    const uint8_t* sums;
    const int64_t sums_lines;
    explicit Passing(const BlockCall& call) : Rows(call), sums(call.sums_ahead), sums_lines(call.sums_lines) {}
    XOPT_INLINE void fetch_ahead() {
      Rows::fetch_ahead();
      for (int64_t i = 0; i < sums_lines; ++i, sums += 64) fetch_for_writing(sums);
    }
  };
  // Of a step what is fetched lies at one distance from its weights.
  struct InPlaces {
    static constexpr bool kWeightsStay = false;
    const int64_t stride, advance, b_advance, ahead_lines, ahead_distance, steps_of_place, to_next_place;
    const uint8_t* const base;
    const int64_t* place;
    const uint8_t *rows, *b;
    int64_t left;
    explicit InPlaces(const BlockCall& call)
        : stride(call.a_stride),
          advance(direction(call) * 64),
          b_advance(direction(call) * 2 * kTileBytes),
          ahead_lines(call.ahead_lines),
          ahead_distance(call.ahead_lines > 0 ? call.ahead - call.b : 0),
          steps_of_place(call.steps_of_place),
          to_next_place(direction(call) * (call.weights_of_place - call.steps_of_place * 2 * kTileBytes)),
          base(static_cast<const uint8_t*>(call.a) + (call.backwards ? (call.steps_of_place - 1) * 64 : 0)),
          place(call.places + (call.backwards ? call.k_tiles / call.steps_of_place - 1 : 0)),
          rows(base + *place),
          b(call.b),
          left(call.steps_of_place) {
      if (call.backwards) b += (place - call.places) * call.weights_of_place + (steps_of_place - 1) * 2 * kTileBytes;
    }
    XOPT_INLINE void next() {
      rows += advance;
      b += b_advance;
      if (--left == 0) next_place();
    }
    XOPT_INLINE void next_place() {
      place += advance > 0 ? 1 : -1;
      rows = base + *place;
      b += to_next_place;
      left = steps_of_place;
    }
    XOPT_INLINE void fetch_ahead() { fetch_lines(b + ahead_distance, ahead_lines); }
  };

  template <class Between>
  static void run(int64_t rows, const BlockCall& call, Between& between) {
    if (call.k_tiles == 0) {
      if (call.kept != nullptr) store(*call.kept);
      __builtin_memset(call.acc, 0, kRows * kPanelColumns * 4);
    } else if (call.a_stride != 0) {
      run_on<InRows>(rows, call, between);
    } else {
      run_on<Copied>(rows, call, between);
    }
  }
  // Of a call with `sums_ahead`, and at least one step.
  template <class Between>
  static void run_passing(int64_t rows, const BlockCall& call, Between& between) {
    if (call.a_stride != 0) {
      run_on<Passing<InRows>>(rows, call, between);
    } else {
      run_on<Passing<Copied>>(rows, call, between);
    }
  }
  // Of a call with `places`, and at least one step.
  template <class Between>
  static void run_places(int64_t rows, const BlockCall& call, Between& between) {
    run_on<InPlaces>(rows, call, between);
  }

  template <class Rows, class Between>
  static void run_on(int64_t rows, const BlockCall& call, Between& between) {
    if (rows > kTileRows) {
      two_row_tiles<Rows>(call, between);
    } else {
      one_row_tile<Rows>(call, between);
    }
  }

  // Sums are tiles 0 and 1, and below them 2 and 3, where there are two rows of tiles.
  static constexpr int64_t kSumRowBytes = kPanelColumns * 4, kRight = 64, kBelow = kTileRows * kSumRowBytes;

  // Sums of the block before that are still in tiles go where they belong.
  static void store(KeptSums& kept) {
    if (kept.acc == nullptr) return;
    auto* to = static_cast<uint8_t*>(kept.acc);
    XOPT_TILE_STORE(0, to, kSumRowBytes);
    XOPT_TILE_STORE(1, to + kRight, kSumRowBytes);
    if (kept.two_rows) {
      XOPT_TILE_STORE(2, to + kBelow, kSumRowBytes);
      XOPT_TILE_STORE(3, to + kBelow + kRight, kSumRowBytes);
    }
    kept.acc = nullptr;
    asm volatile("" : : : "memory");
  }

// A tile of sums begins, after those that it may hold of the block before have been stored.
#define XOPT_BEGIN_SUMS(C, PLACE)                                              \
  do {                                                                         \
    if (before != nullptr) XOPT_TILE_STORE(C, before + (PLACE), kSumRowBytes); \
    if (call.accumulate) {                                                     \
      XOPT_TILE_LOAD(C, acc + (PLACE), kSumRowBytes);                          \
    } else {                                                                   \
      XOPT_TILE_ZERO(C);                                                       \
    }                                                                          \
  } while (false)

  // Sums of as many rows of tiles that the block before has left, or nullptr.
  template <bool TwoRows>
  static XOPT_INLINE uint8_t* kept_before(const BlockCall& call) {
    if (call.kept == nullptr || call.kept->acc == nullptr) return nullptr;
    if (call.kept->two_rows == TwoRows) return static_cast<uint8_t*>(call.kept->acc);
    store(*call.kept);
    return nullptr;
  }

  template <bool TwoRows>
  static XOPT_INLINE void end_sums(const BlockCall& call) {
    KeptSums sums{call.acc, TwoRows};
    if (call.kept != nullptr) {
      *call.kept = sums;
    } else {
      store(sums);
    }
  }

#define XOPT_LOAD_ROWS(T, FROM)            \
  do {                                     \
    if constexpr (Rows::kWeightsStay) {    \
      XOPT_TILE_STREAM(T, FROM, a.stride); \
    } else {                               \
      XOPT_TILE_LOAD(T, FROM, a.stride);   \
    }                                      \
  } while (false)
#define XOPT_LOAD_WEIGHTS(T, FROM)      \
  do {                                  \
    if constexpr (Rows::kWeightsStay) { \
      XOPT_TILE_LOAD(T, FROM, 64);      \
    } else {                            \
      XOPT_TILE_STREAM(T, FROM, 64);    \
    }                                   \
  } while (false)

  template <class Rows, class Between>
  static void two_row_tiles(const BlockCall& call, Between& between) {
    Rows a(call);  // not an argument, which would stay in memory
    uint8_t* const before = kept_before<true>(call);
    const auto* acc = static_cast<const uint8_t*>(call.acc);
    VectorsAwake awake;
    // What stands before the next step's first loads, and after them.
    const auto most_of_step = [&](auto first) __attribute__((always_inline)) {
      if constexpr (first) XOPT_BEGIN_SUMS(0, 0);
      XOPT_DOT(0, 4, 6);
      XOPT_LOAD_WEIGHTS(7, a.b + kTileBytes);
      if constexpr (first) XOPT_BEGIN_SUMS(1, kRight);
      XOPT_DOT(1, 4, 7);
      XOPT_TILE_ZERO(4);
      XOPT_LOAD_ROWS(5, a.rows + kTileRows * a.stride);
      if constexpr (first) XOPT_BEGIN_SUMS(2, kBelow);
      XOPT_DOT(2, 5, 6);
      XOPT_TILE_ZERO(6);
      if constexpr (first) XOPT_BEGIN_SUMS(3, kBelow + kRight);
    };
    const auto end_of_step = [&]() __attribute__((always_inline)) {
      XOPT_DOT(3, 5, 7);
      XOPT_TILE_ZERO(5);
      XOPT_TILE_ZERO(7);
      awake.step();
    };
    const auto next_step = [&]() __attribute__((always_inline)) {
      a.next();
      XOPT_LOAD_WEIGHTS(6, a.b);
      end_of_step();
      XOPT_LOAD_ROWS(4, a.rows);
      a.fetch_ahead();
      between.step();
    };
    XOPT_LOAD_ROWS(4, a.rows);
    XOPT_LOAD_WEIGHTS(6, a.b);
    most_of_step(std::true_type{});
    a.fetch_ahead();
    for (int64_t t = 1; t < call.k_tiles; ++t) {
      next_step();
      most_of_step(std::false_type{});
    }
    end_of_step();
    between.step();
    end_sums<true>(call);
  }

  template <class Rows, class Between>
  static void one_row_tile(const BlockCall& call, Between& between) {
    Rows a(call);
    uint8_t* const before = kept_before<false>(call);
    const auto* acc = static_cast<const uint8_t*>(call.acc);
    VectorsAwake awake;
    XOPT_BEGIN_SUMS(0, 0);
    XOPT_BEGIN_SUMS(1, kRight);
    for (int64_t t = 0; t < call.k_tiles; ++t) {
      if (t > 0) a.next();
      XOPT_LOAD_ROWS(4, a.rows);
      XOPT_LOAD_WEIGHTS(6, a.b);
      XOPT_LOAD_WEIGHTS(7, a.b + kTileBytes);
      XOPT_DOT(0, 4, 6);
      XOPT_TILE_ZERO(6);
      XOPT_DOT(1, 4, 7);
      XOPT_TILE_ZERO(4);
      XOPT_TILE_ZERO(7);
      awake.step();
      a.fetch_ahead();
      between.step();
    }
    end_sums<false>(call);
  }
#undef XOPT_LOAD_WEIGHTS
#undef XOPT_LOAD_ROWS
#undef XOPT_BEGIN_SUMS
#undef XOPT_DOT
};

// Of a slice along k, whose weights of a panel stay in L1 while rows pass: it holds 32 KB of them beside these and their
// sums.
constexpr int64_t kSliceTiles = 16;
template <class Kind>
struct SliceBlock : TileBlock<Kind, kSliceTiles> {
  template <class Between>
  static void run(int64_t rows, const BlockCall& call, Between& between) {
    TileBlock<Kind, kSliceTiles>::run_passing(rows, call, between);
  }
};

// A product's k goes through in one block where it can: sums that wait in memory for the next one cost more than
// anything that a shorter block saves. Two sizes, so that short rows lie close together.
constexpr int64_t kShortTiles = 32, kLongTiles = 128;

}  // namespace xopt::XOPT_ISA
#endif
