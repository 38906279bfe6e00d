// Items that threads take one after the other.
#pragma once

#include "runtime/parallel.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// They may be of unequal length (causality): each goes to whichever thread is free, and no item's result depends on another.
template <class Compute>
void for_each_item(int64_t items, int64_t threads, const Compute& make_compute) {
  int64_t next = 0;
  parallel_for_some(static_cast<int>(minimum(items, threads)), [&](int, int) {
    auto compute = make_compute();
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (item >= items) return;
      compute(item);
    }
  });
}

}  // namespace xopt::XOPT_ISA
