// Probabilities of a step's scores, some rows after each instruction that multiplies tiles (attention_tiles.h).
//
// This stands within the loops of the products, and what it needs in registers: as a call for each few rows it took as long
// as the products themselves.
#pragma once

#include "kernels/attention_softmax.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// Of rows of 32 columns, `Rows` at a time. `Adds`: a mask was added to the scores.
template <int64_t Rows, bool Adds>
class ExponentialsBetween {
 public:
  // `count`: of rows, a multiple of Rows, which lie one after the other in `scores` and `to`. `references`: what counts of
  // rows begin with or, where a mask was added, what is subtracted. `scale`: of a score into counts.
  ExponentialsBetween(const float* scores, Bf16* to, const float* references, float scale, int64_t count)
      : scores_(scores),
        to_(to),
        end_(to + count * kPanelColumns),
        references_(references),
        scale_(set1(scale)),
        most_(_mm512_setzero_si512()) {}

  XOPT_INLINE void step() {
    if (to_ == end_) return;
#pragma GCC unroll 4
    for (int64_t row = 0; row < Rows; ++row) exponentiate(row);
    scores_ += Rows * kPanelColumns;
    to_ += Rows * kPanelColumns;
    references_ += Rows;
  }
  void finish() {
    while (to_ != end_) step();
  }
  // The largest of all counts, word by word.
  __m512i most() const { return most_; }

 private:
  XOPT_INLINE void exponentiate(int64_t row) {
    const float* scores = scores_ + row * kPanelColumns;
    const F reference = set1(references_[row]);
    const auto count = [&](int64_t column) { return count_of<Adds>(load(scores + column), reference, scale_); };
    const __m512i counts = exp2_counts(count(0), count(kWidth));
    most_ = _mm512_max_epu16(most_, counts);
    _mm512_store_si512(to_ + row * kPanelColumns, exp2_words(counts));
  }

  const float* scores_;
  Bf16 *to_, *end_;
  const float* references_;
  F scale_;
  __m512i most_;
};

}  // namespace xopt::XOPT_ISA
#endif
