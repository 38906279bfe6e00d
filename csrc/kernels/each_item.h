// Items that threads take one after the other.
#pragma once

#include "runtime/parallel.h"
#include "runtime/shared_parts.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// They may be of unequal length (causality): who has no more takes over from others, and no item's result depends on
// another. Neighbouring items are one thread's as far as may be. They are mostly heads, whose rows lie side by side: while
// two threads took them in turns, each fetched and wrote lines beside those that the other was writing (128 x 128 x 64 in
// a BERT of 8 sequences took 1.3 times as long).
template <class Compute>
void for_each_item(int64_t items, int64_t threads, const Compute& make_compute) {
  const auto team = static_cast<int>(minimum(items, threads));
  SharedParts shared(team, 1);
  shared.deal(items);
  parallel_for_some(team, [&](int thread, int count) {
    auto compute = make_compute();
    shared.each(thread, count, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) compute(item);
    });
  });
}

}  // namespace xopt::XOPT_ISA
