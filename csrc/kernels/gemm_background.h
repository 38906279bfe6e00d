// What a thread does between the products of a block: prefetches, the epilogue of the rows before, the copy of the rows
// that come next.
//
// A tile product keeps the matrix unit busy for 16 cycles and the rest of the core for one, so this work is nearly free
// there; done after the products, the epilogue has to wait for the last of them and for the tile stores before its
// first load. Blocks that multiply on the vector ports have nothing to gain; they finish the epilogue at once.
#pragma once

#include "kernels/epilogue.h"
#include "tiles/block.h"

namespace xopt::XOPT_ISA {

// All that a block on the vector ports lets happen: a call in its loop would cost it its registers.
class Prefetches {
 public:
  void clear() { count_ = 0; }
  void add(const Prefetch& prefetch) { streams_[count_++] = prefetch; }
  XOPT_INLINE void step() {
    for (int i = 0; i < count_; ++i) streams_[i].step();
  }

 private:
  Prefetch streams_[3];
  int count_ = 0;
};

constexpr int64_t kEpilogueRows = 4, kCopyRows = 2;

// Rows to do, spread evenly over steps to come, a few at a time: what a call costs is shared by them.
struct PacedRows {
  int64_t next = 0, rows = 0, steps = 1, debt = 0, at_once = 1;

  void start(int64_t row_count, int64_t step_count, int64_t rows_at_once) {
    next = 0;
    at_once = rows_at_once;
    rows = row_count;
    steps = maximum<int64_t>(1, step_count);
    debt = 0;
  }
  // The rows up to which work is due after one more step.
  XOPT_INLINE int64_t due() {
    debt += rows;
    if (debt < steps * at_once) return next;
    const int64_t due_rows = debt / steps;
    debt -= due_rows * steps;
    return minimum(next + due_rows, rows);
  }
};

// Copier: copy_rows(begin, end) for rows of a block of A.
template <class Copier>
class Background {
 public:
  explicit Background(EpilogueFn* epilogue) : epilogue_(epilogue) {}

  Prefetches prefetches;

  // A strip whose sums are complete; they must stay untouched until it is finished, `steps` from now or at once if
  // the next strip comes earlier.
  void defer_epilogue(const GemmCall* call, const EpilogueStrip& strip, int64_t rows, int64_t steps) {
    finish_epilogue();
    call_ = call;
    strip_ = strip;
    epilogue_rows_.start(rows, steps, kEpilogueRows);
  }
  void defer_copy(const Copier& copier, int64_t rows, int64_t steps) {
    copier_ = copier;
    copy_rows_.start(rows, steps, kCopyRows);
  }

  // Called by a block for each step along k.
  XOPT_INLINE void step() {
    prefetches.step();
    if (epilogue_rows_.next < epilogue_rows_.rows) do_epilogue(epilogue_rows_.due());
    if (copy_rows_.next < copy_rows_.rows) do_copy(copy_rows_.due());
    asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  }

  void finish_epilogue() { do_epilogue(epilogue_rows_.rows); }
  void finish_copy() {
    do_copy(copy_rows_.rows);
    asm volatile("" : : : "memory");
  }

 private:
  void do_epilogue(int64_t end) {
    if (epilogue_rows_.next < end) epilogue_(*call_, strip_, epilogue_rows_.next, end);
    epilogue_rows_.next = end;
  }
  void do_copy(int64_t end) {
    if (copy_rows_.next < end) copier_.copy_rows(copy_rows_.next, end);
    copy_rows_.next = end;
  }

  EpilogueFn* epilogue_;
  const GemmCall* call_ = nullptr;
  EpilogueStrip strip_{};
  PacedRows epilogue_rows_;
  Copier copier_{};
  PacedRows copy_rows_;
};

}  // namespace xopt::XOPT_ISA
