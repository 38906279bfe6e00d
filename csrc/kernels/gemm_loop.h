// Who computes what of a product: the threads' grid, and what is done in two steps because a norm needs whole rows.
#pragma once

#include "kernels/gemm_thread.h"
#include "kernels/grid.h"
#include "kernels/norm_input.h"
#include "kernels/slice_loop.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {

template <class Block>
EpilogueFn* select_epilogue(const GemmCall& call) {
  static Kernel<SelectEpilogueFn> select("epilogue", Block::kIsInt ? "s32" : "f32");
  EpilogueFn* chosen = nullptr;
  select(call, &chosen);
  return chosen;
}

template <class Block>
class GemmLoop {
 public:
  explicit GemmLoop(const GemmCall& call) : call_(call), plan_(call) {}

  void run() {
    if (call_.epilogue.norm == Norm::none) {
      compute_grid(call_, select_epilogue<Block>(call_));
    } else if (plan_.grid_panels == 1 && !sums_wait()) {
      run_norm_by_rows();
    } else {
      run_norm_in_two_steps();
    }
  }

 private:
  void compute_grid(const GemmCall& call, EpilogueFn* epilogue) const {
    const Grid grid(plan_, call.weight, 1, plan_.grid_rows, plan_.grid_panels);
    grid.each(plan_.max_threads, [&](int64_t, Range rows, Range panels, int64_t weights_end) {
      GemmThread<Block>(call, Merged(call.a), plan_, epilogue, 0).compute(rows, panels, weights_end);
    });
  }

  // Of weights that L2 does not hold, each group of rows reads all anew, which takes longer than to write all sums and read
  // them again, if there are not too many (1024 x 768 x 3072 on AMX: 1.13 times).
  bool sums_wait() const {
    const bool few = call_.m * call_.weight.n * 4 <= plan_.max_threads * 2 * l2_bytes();
    return Block::kBackground && few && !plan_.weights_stay(call_.weight);
  }

  // Rows of the norm's input are complete within a thread: it normalises a group of them while they are in L2.
  void run_norm_by_rows() const {
    static Kernel<RowNormFn> norm("row_norm", "f32");
    const int64_t n = call_.weight.n;
    // Of fp32 values: more where weights come from beyond L2, once for each group.
    const bool weights_stay = plan_.weights_stay(call_.weight);
    const int64_t group_bytes = l2_bytes() / 8 * (weights_stay ? 1 : 3);
    const int64_t group = maximum<int64_t>(1, group_bytes / (n * plan_.block_rows * 4));  // row blocks
    EpilogueFn* epilogue = select_epilogue<Block>(norm_input_call(call_, nullptr));
    const int64_t threads = minimum(plan_.max_threads, plan_.row_blocks);
    SharedParts shared(threads, group);
    shared.deal(plan_.row_blocks);
    parallel_for_some(static_cast<int>(threads), [&](int thread, int count) {
      shared.each(thread, count, [&](int64_t, int64_t begin, int64_t end) {
        const Scratch scratch(static_cast<size_t>(minimum(group, end - begin) * plan_.block_rows * n * 4));
        const GemmCall inner = norm_input_call(call_, scratch.as<float>());
        for (int64_t b = begin; b < end; b += group) {
          const int64_t last = minimum(b + group, end), first = plan_.first_row(b);
          const Range panels{0, call_.weight.panels};
          const int64_t weights_end = weights_stay && b > begin ? 0 : panels.end;
          GemmThread<Block>(inner, Merged(inner.a), plan_, epilogue, first).compute({b, last}, panels, weights_end);
          norm(call_, scratch.as<float>(), first, int64_t{0}, plan_.first_row(last) - first);
        }
      });
    });
  }

  // Threads share rows, since reading all weights in each would cost more: the norm waits for the last of them.
  void run_norm_in_two_steps() const {
    const Scratch scratch(static_cast<size_t>(call_.m * call_.weight.n * 4));
    const GemmCall inner = norm_input_call(call_, scratch.as<float>());
    compute_grid(inner, select_epilogue<Block>(inner));
    normalise(call_, scratch.as<float>(), 0, call_.m);
  }

  const GemmCall& call_;
  const GemmPlan<Block> plan_;
};

template <class Block>
void gemm_with(const GemmCall& call) {
  if (call.m == 0 || call.weight.n == 0) return;
  GemmLoop<Block>(call).run();
}

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
template <class Kind>
void gemm_with_tiles(const GemmCall& call) {
  using Slices = SliceBlock<Kind>;
  const Merged rows(call.a);
  if (slices_pay<Slices>(call, rows)) return SliceLoop<Slices, Merged>(call, rows).run(select_epilogue<Slices>);
  if (call.weight.k_tiles <= kShortTiles) return gemm_with<TileBlock<Kind, kShortTiles>>(call);
  gemm_with<TileBlock<Kind, kLongTiles>>(call);
}
#endif

}  // namespace xopt::XOPT_ISA
