// The loops around a block: who computes what, in which order, and what lies in which cache meanwhile.
//
//   thread       a rectangle of the output: a range of row blocks x a range of panels (no split of K, so results do not
//                depend on the number of threads)
//    row chunk   rows whose copy of A and partial sums fit in L2; weights are read once per chunk
//     panel chunk  kChunkPanels panels: their slice of weights along K stays in L2 while all rows of the chunk pass
//      k block     kMaxTiles tiles along K
//       row block    a block's rows; their copy of A (this k block) stays in L1 while the panels of the chunk pass
//        panel         the block's product, partial sums kept in scratch between k blocks; after the last, the epilogue
//
// While a slice of weights is multiplied, the next is fetched into L2, spread evenly over the k steps. A call with one
// row block goes through a panel's whole K before the next panel, so that weights stream in their order in memory.
#pragma once

#include "kernels/gemm_background.h"
#include "kernels/gemm_plan.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// One block of A on its way from the view into a copy.
template <class Block>
struct BlockCopier {
  using A = typename Block::A;
  const Merged* view;
  A* to;
  int32_t* row_sums;  // of int8 weights with zero points, else nullptr
  int64_t first_row, rows;
  int64_t k0, count, padded;

  void copy_row(int64_t row) const {
    A* target = to + row * Block::kStride;
    if (row >= rows) {
      // Tiles always have all their rows: the missing ones are zeros, not what a former call left.
      __builtin_memset(target, 0, static_cast<size_t>(padded) * sizeof(A));
      return;
    }
    xopt::XOPT_ISA::copy_row<Block>(*view, first_row + row, k0, count, padded, target);
    if constexpr (Block::kIsInt) {
      if (row_sums != nullptr) {
        const int32_t sum = sum_run<typename Block::Round>(view->run(first_row + row, k0).data, count);
        row_sums[row] = k0 == 0 ? sum : row_sums[row] + sum;
      }
    }
  }
};

// A thread's part of a call.
template <class Block>
class GemmThread {
  using A = typename Block::A;
  static constexpr int64_t kBlockBytes = Block::kRows * Block::kStride * static_cast<int64_t>(sizeof(A));
  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4;

 public:
  // `out_row_offset`: the output row that row 0 of epilogue.out is.
  GemmThread(const GemmCall& call, const GemmPlan<Block>& plan, EpilogueFn* epilogue, int64_t out_row_offset)
      : call_(call),
        w_(call.weight),
        plan_(plan),
        view_(call.a, call.weight.k),
        out_row_offset_(out_row_offset),
        background_(epilogue) {}

  void compute(Range rows, Range panels) {
    [[maybe_unused]] const typename Block::Scope scope;
    last_panel_ = panels.end;
    const int64_t chunk_blocks = minimum(plan_.chunk_blocks, rows.size());
    const int64_t chunk_panels = rows.size() == 1 ? 1 : GemmPlan<Block>::kChunkPanels;
    acc_blocks_ = chunk_blocks * chunk_panels;
    // A deferred epilogue reads its sums while the next block is computed: a second set, where a chunk is one block.
    const Scratch acc(static_cast<size_t>(maximum<int64_t>(acc_blocks_, 2) * kAccBytes));
    const Scratch a(static_cast<size_t>(chunk_blocks * plan_.k_blocks * kBlockBytes));
    const Scratch row_sums(static_cast<size_t>(chunk_blocks * Block::kRows * 4));
    acc_ = acc.as<uint8_t>();
    a_ = a.as<uint8_t>();
    row_sums_ = row_sums.as<int32_t>();
    for (int64_t row = rows.begin; row < rows.end; row += chunk_blocks) {
      rows_ = {row, minimum(row + chunk_blocks, rows.end)};
      copied_ = false;
      for (int64_t panel = panels.begin; panel < panels.end; panel += chunk_panels) {
        panels_ = {panel, minimum(panel + chunk_panels, panels.end)};
        panel_chunk();
        copied_ = true;
        odd_chunk_ = !odd_chunk_;
      }
      background_.finish_epilogue();  // before row sums and the copy of A are overwritten
    }
  }

 private:
  void panel_chunk() {
    if (!copied_) background_.defer_copy(copier(rows_.begin, 0), padded_rows(rows_.begin));
    for (int64_t kb = 0; kb < plan_.k_blocks; ++kb) {
      for (int64_t rb = rows_.begin; rb < rows_.end; ++rb) {
        if (!copied_) {
          background_.finish_copy();
          defer_next_copy(kb, rb);
        }
        for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) step(kb, rb, panel);
      }
    }
  }

  // The block of A that follows (kb, rb), if any.
  bool next_block(int64_t* kb, int64_t* rb) const {
    if (++*rb < rows_.end) return true;
    *rb = rows_.begin;
    return ++*kb < plan_.k_blocks;
  }

  void defer_next_copy(int64_t kb, int64_t rb) {
    if (next_block(&kb, &rb)) background_.defer_copy(copier(rb, kb), padded_rows(rb));
  }

  int64_t padded_rows(int64_t rb) const {
    const int64_t rows = plan_.rows_of(rb, call_.m);
    return Block::kEvenRows ? rows : round_up(rows, kTileRows);
  }

  BlockCopier<Block> copier(int64_t rb, int64_t kb) const {
    BlockCopier<Block> copier;
    copier.view = &view_;
    copier.to = reinterpret_cast<A*>(a_copy(rb, kb));
    copier.row_sums = w_.zero_point != nullptr ? row_sums_ + (rb - rows_.begin) * Block::kRows : nullptr;
    copier.first_row = rb * plan_.block_rows;
    copier.rows = plan_.rows_of(rb, call_.m);
    copier.k0 = kb * plan_.k_block_tiles * Block::kTileK;
    copier.padded = plan_.tiles_of(kb, w_.k_tiles) * Block::kTileK;
    copier.count = minimum(w_.k - copier.k0, copier.padded);
    return copier;
  }

  uint8_t* a_copy(int64_t rb, int64_t kb) const { return a_ + (kb * rows_.size() + rb - rows_.begin) * kBlockBytes; }

  uint8_t* acc(int64_t rb, int64_t panel) const {
    if (acc_blocks_ == 1) return acc_ + (odd_chunk_ ? kAccBytes : 0);
    return acc_ + ((rb - rows_.begin) * panels_.size() + panel - panels_.begin) * kAccBytes;
  }

  void step(int64_t kb, int64_t rb, int64_t panel) {
    const int64_t rows = plan_.rows_of(rb, call_.m);
    BlockCall block;
    block.a = a_copy(rb, kb);
    block.b = w_.panel_data + panel * w_.panel_bytes + kb * plan_.k_block_tiles * 2 * kTileBytes;
    block.k_tiles = plan_.tiles_of(kb, w_.k_tiles);
    block.acc = acc(rb, panel);
    block.accumulate = kb > 0;
    add_prefetches(kb, rb, panel, block.k_tiles);
    if constexpr (Block::kBackground) {
      background_.begin(block.k_tiles, panels_.size());
      Block::run(rows, block, background_);
    } else {
      Block::run(rows, block, background_.prefetches);
    }
    if (kb + 1 < plan_.k_blocks) return;

    const int64_t width = w_.gated ? kTileColumns : kPanelColumns;
    EpilogueBlock done;
    done.acc = block.acc;
    done.row = rb * plan_.block_rows;
    done.out_row = done.row - out_row_offset_;
    done.panel = panel;
    done.column = panel * width;
    done.columns = minimum(width, w_.n - done.column);
    done.row_sums = row_sums_ + (rb - rows_.begin) * Block::kRows;
    done.a_offset = Block::kOffset;
    background_.defer_epilogue(&call_, done, rows);
    if constexpr (!Block::kBackground) background_.finish_epilogue();
  }

  void add_prefetches(int64_t kb, int64_t rb, int64_t panel, int64_t k_tiles) {
    background_.prefetches.clear();
    if (k_tiles == 0) return;
    prefetch_weights(kb, rb, panel);
    if (!copied_) prefetch_a(kb, rb, panel);
    if (kb + 1 == plan_.k_blocks) prefetch_output(rb, panel, k_tiles);
  }

  // The slice after this one: of the same panel at the next k, or of the next chunk's at the first. Each row block
  // fetches its share of it.
  void prefetch_weights(int64_t kb, int64_t rb, int64_t panel) {
    const int64_t slice = plan_.k_block_tiles * 2 * kTileBytes;
    const bool same_panel = kb + 1 < plan_.k_blocks;
    const int64_t next_panel = same_panel ? panel : panel + panels_.size();
    if (next_panel >= last_panel_) return;
    const int64_t lines = ceil_div(2 * kTileBytes / 64, rows_.size());  // for each k step
    const int64_t offset = (rb - rows_.begin) * lines * 64 * plan_.k_block_tiles;
    if (offset >= slice) return;
    const uint8_t* from = w_.panel_data + next_panel * w_.panel_bytes + (same_panel ? (kb + 1) * slice : 0) + offset;
    background_.prefetches.add({from, lines * 64, 64, lines, false});
  }

  // Rows of the block after the one whose copy is under way, a share for each panel; a k step of them is a line or two.
  void prefetch_a(int64_t kb, int64_t rb, int64_t panel) {
    if (!next_block(&kb, &rb) || (Block::kBackground && !next_block(&kb, &rb))) return;
    const Range rows = share(plan_.rows_of(rb, call_.m), panels_.size(), panel - panels_.begin);
    if (rows.size() == 0) return;
    const int64_t size = dtype_size(call_.a.dtype);
    const Run run = view_.run(rb * plan_.block_rows + rows.begin, kb * plan_.k_block_tiles * Block::kTileK);
    background_.prefetches.add({run.data, Block::kTileK * size, call_.a.row_stride * size, rows.size(), false});
  }

  // The lines that the epilogue will write after this block, and those of `other` that it will read.
  void prefetch_output(int64_t rb, int64_t panel, int64_t k_tiles) {
    const Epilogue& e = call_.epilogue;
    const int64_t column = panel * (w_.gated ? kTileColumns : kPanelColumns);
    const int64_t rows = ceil_div(plan_.rows_of(rb, call_.m), k_tiles);  // for each k step
    auto add = [&](const void* data, DType dtype, int64_t row, int64_t row_stride, bool for_writing) {
      const int64_t stride = row_stride * dtype_size(dtype);
      const auto* first = static_cast<const uint8_t*>(data) + row * stride + column * dtype_size(dtype);
      background_.prefetches.add({first, rows * stride, stride, rows, for_writing});
    };
    const int64_t row = rb * plan_.block_rows;
    add(e.out, e.out_dtype, row - out_row_offset_, e.out_row_stride, true);
    if (e.binary != Binary::none && e.other_row_stride != 0)
      add(e.other, e.other_dtype, row, e.other_row_stride, false);
  }

  const GemmCall& call_;
  const PackedWeight& w_;
  const GemmPlan<Block>& plan_;
  const Merged view_;
  const int64_t out_row_offset_;
  Background<BlockCopier<Block>> background_;

  uint8_t* a_ = nullptr;    // copies [k block][row block of the chunk][kBlockBytes]
  uint8_t* acc_ = nullptr;  // partial sums [row block][panel of the chunk][kAccBytes]
  int32_t* row_sums_ = nullptr;
  int64_t acc_blocks_ = 0, last_panel_ = 0;
  Range rows_{}, panels_{};  // the chunk
  bool copied_ = false;      // the chunk's copy of A is complete
  bool odd_chunk_ = false;
};

template <class Block>
class GemmLoop {
 public:
  explicit GemmLoop(const GemmCall& call) : call_(call), plan_(call) {}

  void run() {
    if (call_.epilogue.norm == Norm::none) {
      compute_grid(call_, select(call_));
    } else if (plan_.row_blocks >= plan_.max_threads) {
      run_norm_by_rows();
    } else {
      run_norm_in_two_steps();
    }
  }

 private:
  static EpilogueFn* select(const GemmCall& call) {
    static Kernel<SelectEpilogueFn> select("epilogue", Block::kIsInt ? "s32" : "f32");
    EpilogueFn* chosen = nullptr;
    select(call, &chosen);
    return chosen;
  }

  void compute_grid(const GemmCall& call, EpilogueFn* epilogue) const {
    const int64_t parts = plan_.grid_rows * plan_.grid_panels;
    parallel(static_cast<int>(parts), [&](int thread, int threads) {
      GemmThread<Block> part(call, plan_, epilogue, 0);
      for (int64_t i = thread; i < parts; i += threads) {  // the runtime may grant fewer threads
        part.compute(share(plan_.row_blocks, plan_.grid_rows, i / plan_.grid_panels),
                     share(call.weight.panels, plan_.grid_panels, i % plan_.grid_panels));
      }
    });
  }

  // Rows of the norm's input are complete within a thread: it normalises a group of them while they are in L2.
  void run_norm_by_rows() const {
    static Kernel<RowNormFn> norm("row_norm", "f32");
    const int64_t n = call_.weight.n;
    const int64_t group = maximum<int64_t>(1, 262144 / (n * plan_.block_rows * 4));  // row blocks
    EpilogueFn* epilogue = select(norm_input_call(nullptr));
    parallel(static_cast<int>(plan_.max_threads), [&](int thread, int threads) {
      const Range blocks = share(plan_.row_blocks, threads, thread);
      if (blocks.size() == 0) return;
      const Scratch scratch(static_cast<size_t>(minimum(group, blocks.size()) * plan_.block_rows * n * 4));
      const GemmCall inner = norm_input_call(scratch.as<float>());
      for (int64_t b = blocks.begin; b < blocks.end; b += group) {
        const int64_t end = minimum(b + group, blocks.end), first = b * plan_.block_rows;
        GemmThread<Block>(inner, plan_, epilogue, first).compute({b, end}, {0, call_.weight.panels});
        norm(call_, scratch.as<float>(), first, int64_t{0}, minimum(end * plan_.block_rows, call_.m) - first);
      }
    });
  }

  // Few rows: all threads share them, so the norm waits for the last of them.
  void run_norm_in_two_steps() const {
    static Kernel<RowNormFn> norm("row_norm", "f32");
    const Scratch scratch(static_cast<size_t>(call_.m * call_.weight.n * 4));
    const GemmCall inner = norm_input_call(scratch.as<float>());
    compute_grid(inner, select(inner));
    parallel(static_cast<int>(minimum(plan_.max_threads, call_.m)), [&](int thread, int threads) {
      const Range rows = share(call_.m, threads, thread);
      norm(call_, scratch.as<float>(), int64_t{0}, rows.begin, rows.end);
    });
  }

  GemmCall norm_input_call(float* values) const {
    GemmCall inner = call_;
    inner.epilogue.out = values;
    inner.epilogue.out_dtype = DType::f32;
    inner.epilogue.out_row_stride = call_.weight.n;
    return inner;
  }

  const GemmCall& call_;
  const GemmPlan<Block> plan_;
};

template <class Block>
void gemm_with(const GemmCall& call) {
  if (call.m > 0 && call.weight.n > 0) GemmLoop<Block>(call).run();
}

}  // namespace xopt::XOPT_ISA
