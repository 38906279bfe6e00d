// Which products read rows of A where they are, and which copy them.
#pragma once

#include <type_traits>

#include "kernels/gemm_plan.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Of a thread's copies of A with tiles, which are kept while all panels pass. 32 row blocks of K = 4096 fit.
inline constexpr int64_t kMostCopyBytes = 20 << 20;

// Of tiles whose rows meet in few sets of L1.
template <class Block>
bool copy_pays(const PackedWeight& w, const GemmPlan<Block>& plan) {
  const bool fits = plan.chunk_blocks * plan.k_blocks * kCopyBytes<Block> <= kMostCopyBytes;
  return fits && w.panels / plan.grid_panels >= kPanelsWorthACopy;
}

// The rows that blocks read from A itself; a step of 0: none.
template <class Block, class View>
EvenRows rows_in_place(const GemmCall& call, const View& view, const GemmPlan<Block>& plan) {
  if constexpr (Block::kBackground && std::is_same_v<View, Merged>) {
    const EvenRows rows = tiles_in_place<Block>(view, call.weight, call.m);
    return plan.tile_rows_meet(rows.step) && copy_pays(call.weight, plan) ? EvenRows{} : rows;
  } else if constexpr (Block::kFinishes && std::is_same_v<View, Merged>) {
    if (plan.reads_in_place) return view.even_rows(call.m);
  }
  return {};
}

}  // namespace xopt::XOPT_ISA
