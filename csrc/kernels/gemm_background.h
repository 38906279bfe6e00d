// What a thread does between the products of a block: prefetches, the epilogue of the block before, the copy of the rows
// that come next.
//
// A tile product keeps the matrix unit busy for 16 cycles and the rest of the core for one, so this work is nearly free
// there, while done after the products it cost a quarter of the time: the epilogue alone has to wait for the last product
// and for the tile stores before its first load (measured on a 768-deep bf16 GEMM). Blocks that multiply on the vector
// ports have nothing to gain; they finish the epilogue at once.
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
  Prefetch streams_[4];
  int count_ = 0;
};

// Copier: copy_row(row) for rows of a block of A.
template <class Copier>
class Background {
 public:
  explicit Background(EpilogueFn* epilogue) : epilogue_(epilogue) {}

  Prefetches prefetches;

  // ---- filled before a block --------------------------------------------------------------------------------------

  // The block whose sums are complete; they must stay untouched until it is finished.
  void defer_epilogue(const GemmCall* call, const EpilogueBlock& block, int64_t rows) {
    finish_epilogue();
    call_ = call;
    block_ = block;
    rows_ = rows;
    row_ = 0;
  }
  void defer_copy(const Copier& copier, int64_t rows) {
    copier_ = copier;
    copy_rows_ = rows;
    copy_row_ = 0;
  }

  // ---- during it --------------------------------------------------------------------------------------------------

  void begin(int64_t steps, int64_t blocks_until_copied) {
    steps = maximum<int64_t>(1, steps);
    rows_per_step_ = (rows_ - row_ + steps - 1) / steps;
    // Copies are spread over several blocks; `debt` counts in rows * steps, so that a row may take many steps.
    copy_steps_ = steps * blocks_until_copied;
    copy_debt_ = 0;
  }

  XOPT_INLINE void step() {
    prefetches.step();
    if (row_ < rows_) {
      const int64_t end = minimum(row_ + rows_per_step_, rows_);
      epilogue_(*call_, block_, row_, end);
      row_ = end;
    }
    if (copy_row_ < copy_rows_) {
      for (copy_debt_ += copy_rows_; copy_debt_ >= copy_steps_; copy_debt_ -= copy_steps_) {
        if (copy_row_ < copy_rows_) copier_.copy_row(copy_row_++);
      }
    }
    asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  }

  // ---- after it ---------------------------------------------------------------------------------------------------

  void finish_epilogue() {
    if (row_ < rows_) epilogue_(*call_, block_, row_, rows_);
    row_ = rows_;
  }
  void finish_copy() {
    while (copy_row_ < copy_rows_) copier_.copy_row(copy_row_++);
    asm volatile("" : : : "memory");
  }

 private:
  EpilogueFn* epilogue_;
  const GemmCall* call_ = nullptr;
  EpilogueBlock block_{};
  int64_t row_ = 0, rows_ = 0, rows_per_step_ = 0;

  Copier copier_{};
  int64_t copy_row_ = 0, copy_rows_ = 0, copy_steps_ = 1, copy_debt_ = 0;
};

}  // namespace xopt::XOPT_ISA
