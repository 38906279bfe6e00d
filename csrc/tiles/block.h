// A block: the innermost product, rows of A (a copy in L1) times one panel of packed weight, into accumulators in L1.
//
// A block type says how its copy of A looks (element type A, what a value is rounded to, distance of rows) and has
//   static void run(int64_t rows, const BlockCall& call)      1 <= rows <= kRows.
// gemm_loop.h does the rest. Blocks of one level and dtype differ only in the instruction that multiplies.
#pragma once

#include "kernels/packed.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

struct BlockCall {
  const void* a;       // row 0 of the copy at this block's first k
  int64_t a_stride;    // bytes between rows; only blocks that can read A in place (AMX) look at it
  const uint8_t* b;    // the panel's first tile at this k; tiles follow each other, 2 KB for each step along k
  int64_t k_tiles;
  void* acc;           // rows of 32 float or int32, kPanelColumns apart
  bool accumulate;     // add to acc instead of overwriting it
  const uint8_t* prefetch;   // what will be wanted in L2 next, touched evenly over the k steps
  int64_t prefetch_lines;    // cache lines for each k step
};

XOPT_INLINE void prefetch_step(const uint8_t*& next, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
}

// Row counts are template arguments of the vector blocks, so that accumulators are registers.
#define XOPT_RUN_ROWS(MAX)                                               \
  static void run(int64_t rows, const BlockCall& call) { Rows<MAX>::run(rows, call); } \
  template <int R, class = void>                                         \
  struct Rows {                                                          \
    static void run(int64_t rows, const BlockCall& call) {               \
      if (rows == R) return block<R>(call);                              \
      if constexpr (R > 1) Rows<R - 1>::run(rows, call);                 \
    }                                                                    \
  };

}  // namespace xopt::XOPT_ISA
