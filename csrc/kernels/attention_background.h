// What attention does between the products of tiles, which keep the matrix unit busy and leave the vector ports free:
// of what a row block's softmax needs, the largest scores while the next panel of keys is multiplied, and the exponentials
// while the first panel of values is, two steps ahead of it. With bf16 and 4096 keys of 40 values this and shorter
// exponentials made attention 1.4 times as fast.
#pragma once

#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// Tile loads do not say that they read memory.
XOPT_INLINE void tile_barrier() { asm volatile("" ::: "memory"); }

// A block loads its next tile of A before it lets happen what stands between its steps.
inline constexpr int64_t kPanelsAhead = 2;

// Looks at panels of scores that nothing masks, some rows of one at each step.
template <class Softmax>
class LargestScores {
 public:
  LargestScores(Softmax* softmax, int64_t rows, int64_t rows_at_once)
      : softmax_(softmax), rows_(rows), rows_at_once_(rows_at_once), row_(rows) {}

  // A panel whose scores are there.
  void begin(int64_t panel) {
    finish();
    panel_ = panel;
    row_ = 0;
  }
  void finish() { look(rows_); }
  XOPT_INLINE void step() {
    if (row_ < rows_) look(minimum(row_ + rows_at_once_, rows_));
    tile_barrier();
  }

 private:
  void look(int64_t end) {
    softmax_->look_at(panel_, row_, end);
    row_ = end;
  }

  Softmax* const softmax_;
  const int64_t rows_, rows_at_once_;
  int64_t panel_ = 0, row_;
};

// Makes probabilities of scores, a panel at each step.
template <class Softmax>
class Probabilities {
 public:
  Probabilities(Softmax* softmax, int64_t panels) : softmax_(softmax), panels_(panels) {}

  // Those of so many panels, before the first product.
  void finish(int64_t count) {
    while (next_ < minimum(count, panels_)) softmax_->exponentiate(next_++);
  }
  XOPT_INLINE void step() {
    if (next_ < panels_) softmax_->exponentiate(next_++);
    tile_barrier();
  }

 private:
  Softmax* const softmax_;
  const int64_t panels_;
  int64_t next_ = 0;
};

}  // namespace xopt::XOPT_ISA
