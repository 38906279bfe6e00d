// A block: the innermost product, rows of A (a copy in L1) times one panel of packed weight, into accumulators in L1.
//
// A block type says how its copy of A looks (element type A, what a value is rounded to, distance of rows) and has
//   template <class Between> static void run(int64_t rows, const BlockCall& call, Between& between)
// for 1 <= rows <= kRows, which calls between.step() once for each tile along k. gemm_thread.h does the rest. Blocks of one
// level and dtype differ only in the instruction that multiplies.
#pragma once

#include "tiles/finish.h"
#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// GCC's own only where it is told that the CPU has this instruction, which does nothing on those that have not.
XOPT_INLINE void fetch_for_writing(const void* line) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const uint8_t*>(line)));
}

// Cache lines that will be wanted soon: `count` lines, one at least, `stride` bytes apart, at each step along k, after which
// `next` moves by `advance`. Spread over the steps they hide behind the products; issued at once they would fill the line
// buffers. Beside a busy hyperthread each instruction here takes time from the products: 5 to 10% of a block's are these.
struct Prefetch {
  const uint8_t* next;
  int64_t advance, stride, count;
  bool for_writing = false;

  XOPT_INLINE void step() {
    const uint8_t* line = next;
    next = line + advance;
    int64_t left = count;
    if (__builtin_expect(for_writing, 0) != 0) {  // what is expected needs no jumps
      do {
        fetch_for_writing(line);
        line += stride;
      } while (--left != 0);
    } else {
      do {
        __builtin_prefetch(line, 0, 2);  // into L2
        line += stride;
      } while (--left != 0);
    }
  }
};

// Values along k that lie side by side in rows of A as in the weights: some tiles, and rows of one more.
struct Piece {
  int32_t a, b;  // bytes from where rows and where the panel begin
  int32_t line;  // of a plane of a convolution's kernel
  uint8_t tiles, rows;
  uint8_t ends_chain;  // 1: sums are added up after it
  uint8_t outside;     // kFirstOutside: no product of the first row, if that begins a line of outputs; kLastOutside
};
enum : uint8_t { kFirstOutside = 1, kLastOutside = 2 };

// Sums that a block of tiles has left in its tiles, where the next one has better to do than wait for them: these are
// stored among that one's first products.
struct KeptSums {
  void* acc = nullptr;
  bool two_rows = false;  // of tiles
};

struct BlockCall {
  const void* a;     // row 0 of the copy at this block's first k
  const uint8_t* b;  // the panel's first tile at this k; tiles follow each other, 2 KB for each step along k
  int64_t k_tiles;
  void* acc;        // rows of 32 float or int32, kPanelColumns apart
  bool accumulate;  // add to acc instead of overwriting it
  // Tiles only: from the last step along k to the first. The next panel then begins with rows of A that are still in L1.
  bool backwards = false;
  // For blocks with kFinishes: what the sums become, a Finish<Round> (acc is then scratch), and how many rows of the last
  // tile hold values.
  const void* finish = nullptr;
  int64_t last_rows = kTileRows;
  // Of how many columns sums are wanted.
  int64_t columns = kPanelColumns;
  // Lines of weights to fetch into L2 for later, so many for each step along k; with `places` they lie as far apart as those
  // at hand. Only blocks with kBackground look here: in registers of their loop it costs them less than among what happens
  // between their products.
  const uint8_t* ahead = nullptr;
  int64_t ahead_lines = 0;
  // Where a panel's weights stay in L1 (SliceBlock): the next block's sums, as many lines for each step.
  const uint8_t* sums_ahead = nullptr;
  int64_t sums_lines = 0;
  // Tiles only: sums may stay in tiles, and those of the block before, which may be there, are stored before step() is
  // called. Without, they are in `acc` when the block returns.
  KeptSums* kept = nullptr;
  // Rows of A that lie elsewhere than in a copy (tiles only): bytes from row to row. Where they lie in places of which each has
  // some of the steps, bytes from `a` to where rows begin in each place, and from one place's weights to the next one's;
  // without these a row's elements follow each other, and so do weights.
  int64_t a_stride = 0;
  const int64_t* places = nullptr;
  int64_t steps_of_place = 0, weights_of_place = 0;
  // For blocks with kFinishes, rows that lie in pieces, of which there are k_tiles. Of each kRowsOfPointer rows, the bytes
  // from `a` to the first; the other follows by a_stride.
  const Piece* pieces = nullptr;
  const int64_t* a_rows = nullptr;
  // Whether the first row begins a line of outputs (kFirstOutside), and the last one ends it (kLastOutside).
  uint8_t outside = 0;
  // Columns that have a part of the values along k to themselves, as many of each piece's as they are: narrow groups of a
  // convolution. Pieces are then those of the first columns. 0: all columns take all values.
  int64_t diagonal = 0;
};
inline constexpr int kRowsOfPointer = 2, kMostPointers = 7;

// Of a row block's copy of A.
template <class Block>
inline constexpr int64_t kCopyBytes = Block::kRows * Block::kStride * static_cast<int64_t>(sizeof(typename Block::A));

// Row counts are template arguments of the vector blocks, so that accumulators are registers.
#define XOPT_ROWS                                                            \
  template <int R, class = void>                                             \
  struct Rows {                                                              \
    template <class Between>                                                 \
    static void run(int64_t rows, const BlockCall& call, Between& between) { \
      if (rows == R) return block<R>(call, between);                         \
      if constexpr (R > 1) Rows<R - 1>::run(rows, call, between);            \
    }                                                                        \
  };
#define XOPT_RUN_ROWS(MAX)                                                 \
  template <class Between>                                                 \
  static void run(int64_t rows, const BlockCall& call, Between& between) { \
    Rows<MAX>::run(rows, call, between);                                   \
  }                                                                        \
  XOPT_ROWS
// Of blocks that are compiled once for all kernels of a level, which says what run is: kernels/float_blocks.h.
#define XOPT_RUN_ROWS_ELSEWHERE                                           \
  template <class Between>                                                \
  static void run(int64_t rows, const BlockCall& call, Between& between); \
  XOPT_ROWS

}  // namespace xopt::XOPT_ISA
