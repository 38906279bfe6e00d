// A block: the innermost product, rows of A (a copy in L1) times one panel of packed weight, into accumulators in L1.
//
// A block type says how its copy of A looks (element type A, what a value is rounded to, distance of rows) and has
//   static void run(int64_t rows, const BlockCall& call)      1 <= rows <= kRows.
// gemm_loop.h does the rest. Blocks of one level and dtype differ only in the instruction that multiplies.
#pragma once

#include "kernels/packed.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// Cache lines that will be wanted soon: `count` lines, `stride` bytes apart, at each step along k, after which `next`
// moves by `step`. Spread over the steps they hide behind the products; issued at once they would fill the line buffers.
struct Prefetch {
  const uint8_t* next;
  int64_t step, stride, count;
  bool for_writing;  // into L1 and owned, else into L2
};

struct BlockCall {
  const void* a;       // row 0 of the copy at this block's first k
  int64_t a_stride;    // bytes between rows; only blocks that can read A in place (AMX) look at it
  const uint8_t* b;    // the panel's first tile at this k; tiles follow each other, 2 KB for each step along k
  int64_t k_tiles;
  void* acc;           // rows of 32 float or int32, kPanelColumns apart
  bool accumulate;     // add to acc instead of overwriting it
  static constexpr int kMaxPrefetches = 4;
  Prefetch prefetches[kMaxPrefetches];
  int prefetch_count;
};

// The prefetches of a call in progress; step() is called once for each step along k.
class Prefetcher {
 public:
  explicit Prefetcher(const BlockCall& call) : count_(call.prefetch_count) {
    for (int i = 0; i < count_; ++i) streams_[i] = call.prefetches[i];
  }
  XOPT_INLINE void step() {
    for (int i = 0; i < count_; ++i) {
      Prefetch& stream = streams_[i];
      const uint8_t* line = stream.next;
      if (stream.for_writing) {
        for (int64_t j = 0; j < stream.count; ++j, line += stream.stride) prefetch_for_writing(line);
      } else {
        for (int64_t j = 0; j < stream.count; ++j, line += stream.stride) __builtin_prefetch(line, 0, 2);
      }
      stream.next += stream.step;
    }
  }

 private:
  static XOPT_INLINE void prefetch_for_writing(const uint8_t* line) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
    asm volatile("prefetchw %0" : : "m"(*line));  // without it the store that follows waits for ownership
#else
    __builtin_prefetch(line, 1, 3);
#endif
  }

  Prefetch streams_[BlockCall::kMaxPrefetches];
  int count_;
};

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
