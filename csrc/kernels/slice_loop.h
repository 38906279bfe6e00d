// Which products go by slices of k (gemm_slices.h), and who computes what of one, at level `amx`.
//
// Rows go by groups, so that copies of them, or sums that wait for a norm, do not become too many: each is copied, then
// multiplied, then normalised, by all threads.
#pragma once

#include "kernels/gemm_slices.h"
#include "kernels/grid.h"
#include "kernels/norm_input.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// Where L2 could hold all weights, it had better. Else slices gain the more the longer k is: sums come in for each of them,
// and weights once for every chunk of row blocks, of which long blocks of k have more. To copy rows that need not be copied
// otherwise takes as long as five of their products, so many should share it (csrc/README.md).
template <class Block>
bool slices_pay(const GemmCall& call, const Merged& view) {
  constexpr int64_t kFewBlocks = 8, kSomeBlocks = 16, kStepsOfCopy = 4096;
  const PackedWeight& w = call.weight;
  if (call.m == 0 || w.k_tiles == 0) return false;
  if (call.tuning.weights_stay != TunedStay::automatic) return call.tuning.weights_stay == TunedStay::never;
  const int64_t blocks = ceil_div(call.m, Block::kRows);
  if (w.panels * w.panel_bytes <= l2_bytes() / 2) return false;
  // A row block by itself gains where its rows leave L1 and more: 32 x 2048 x 8192 1.14, x 14336 1.3; 16 rows 0.96 to 1.02.
  if (blocks == 1) return call.m > kTileRows && w.k_tiles > kLongTiles;
  const bool copies = rows_begin_in_one_set(tiles_in_place<Block>(view, w, call.m));
  if (copies && w.panels * w.k_tiles < kStepsOfCopy) return false;
  if (blocks <= kFewBlocks) return w.k_tiles >= 24;
  return w.k_tiles >= (blocks <= kSomeBlocks ? 32 : 64);
}

template <class Block, class View>
class SliceLoop {
 public:
  SliceLoop(const GemmCall& call, const View& view)
      : call_(call), view_(view), has_norm_(call.epilogue.norm != Norm::none) {}

  void run(EpilogueFn* (*select_epilogue)(const GemmCall& call)) const {
    const int64_t group = rows_of_group();
    const Scratch values(static_cast<size_t>(has_norm_ ? group * call_.weight.n * 4 : 0));
    GemmCall part = has_norm_ ? norm_input_call(call_, values.as<float>()) : call_;
    EpilogueFn* epilogue = select_epilogue(part);
    for (int64_t row = 0; row < call_.m; row += group) {
      part.m = minimum(group, call_.m - row);
      const GemmPlan<Block> plan(part);
      const SliceRows<Block, View> a(part, view_, plan, row);
      const Grid grid(plan, part.weight, 1, plan.grid_rows, plan.grid_panels);
      grid.each(plan.max_threads, [&](int64_t, Range rows, Range panels, int64_t weights_end) {
        GemmSlices<Block, View>(part, a, plan, epilogue, row, has_norm_ ? row : 0).compute(rows, panels, weights_end);
      });
      if (has_norm_) normalise(call_, values.as<float>(), row, part.m);
    }
  }

 private:
  int64_t rows_of_group() const {
    constexpr int64_t kMostCopies = 32 << 20;
    const GemmPlan<Block> plan(call_);
    int64_t most = kMostCopies / (plan.k_blocks * kCopyBytes<Block>);
    if (has_norm_) most = minimum(most, plan.max_threads * 2 * l2_bytes() / (call_.weight.n * 4 * Block::kRows));
    return even_share(plan.row_blocks, maximum<int64_t>(1, most)) * Block::kRows;
  }

  const GemmCall& call_;
  const View view_;
  const bool has_norm_;
};

}  // namespace xopt::XOPT_ISA
#endif
