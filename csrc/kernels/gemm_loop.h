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
// While a slice of weights is multiplied, the next is fetched into L2, spread evenly over the k steps. A call with few
// rows goes through a panel's whole K before the next panel, so that weights stream in their order in memory.
#pragma once

#include "kernels/epilogue.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/block.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

struct GemmRange {
  int64_t begin, end;
};

XOPT_INLINE GemmRange share(int64_t total, int64_t parts, int64_t part) {
  return {total * part / parts, total * (part + 1) / parts};
}

inline KernelFn counted_kernel(const char* name, const char* dtype) {
  KernelRecord* record = find_kernel(name, dtype);
  record->calls.fetch_add(1, std::memory_order_relaxed);
  return record->fn;
}

template <class Block>
class GemmLoop {
  using A = typename Block::A;
  using Acc = typename Block::Acc;
  static constexpr int64_t kBlockBytes = Block::kRows * Block::kStride * static_cast<int64_t>(sizeof(A));
  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4;
  static constexpr int64_t kChunkPanels = 8;
  static constexpr int64_t kChunkRows = sizeof(A) == 4 ? 224 : 256;

 public:
  explicit GemmLoop(const GemmCall& call) : call_(call), view_(call.a, call.weight.k) {
    const PackedWeight& w = call.weight;
    const int64_t row_blocks = (call.m + Block::kRows - 1) / Block::kRows;
    block_rows_ = Block::kEvenRows ? (call.m + row_blocks - 1) / row_blocks : Block::kRows;
    row_blocks_ = (call.m + block_rows_ - 1) / block_rows_;
    // Equal k blocks: a short last one would pay for loading and storing the partial sums like a whole one.
    k_blocks_ = maximum<int64_t>(1, (w.k_tiles + Block::kMaxTiles - 1) / Block::kMaxTiles);
    k_block_tiles_ = (w.k_tiles + k_blocks_ - 1) / k_blocks_;
    if (k_block_tiles_ > 0) k_blocks_ = (w.k_tiles + k_block_tiles_ - 1) / k_block_tiles_;
    chunk_row_blocks_ = maximum<int64_t>(1, kChunkRows / Block::kRows);
    norm_ = call.epilogue.norm != Norm::none;
    choose_grid();
    auto* select = reinterpret_cast<SelectEpilogueFn*>(counted_kernel("epilogue", Block::kIsInt ? "s32" : "f32"));
    // Ahead of a norm, the epilogue writes fp32 into scratch, whatever the output is.
    select(norm_ ? norm_input_call(nullptr) : call, &epilogue_);
  }

  void run() {
    if (!norm_) {
      parallel(grid_rows_ * grid_panels_, [this](int thread, int) {
        const GemmRange rows = share(row_blocks_, grid_rows_, thread / grid_panels_);
        const GemmRange panels = share(call_.weight.panels, grid_panels_, thread % grid_panels_);
        compute(call_, rows, panels, 0);
      });
    } else if (row_blocks_ >= max_threads_) {
      run_norm_by_rows();
    } else {
      run_norm_in_two_steps();
    }
  }

 private:
  // The split of threads into rows x panels that is done first, by a rough count of cycles: a block step costs about
  // 80, copying A's share of it 50, bringing in a step's weights 100.
  void choose_grid() {
    max_threads_ = max_threads();
    int64_t best_cost = INT64_MAX;
    for (int64_t rows = 1; rows <= max_threads_; ++rows) {
      const int64_t panels = minimum<int64_t>(max_threads_ / rows, call_.weight.panels);
      if (rows > row_blocks_ || panels < 1) continue;
      const int64_t r = (row_blocks_ + rows - 1) / rows, p = (call_.weight.panels + panels - 1) / panels;
      const int64_t cost = r * p * 80 + r * 50 + p * 100;
      if (cost < best_cost) {
        best_cost = cost;
        grid_rows_ = rows;
        grid_panels_ = panels;
      }
    }
  }

  // Rows of the norm's input are complete within a thread: it normalises them while they are in L2.
  void run_norm_by_rows() {
    const int64_t n = call_.weight.n;
    const int64_t group = maximum<int64_t>(1, 131072 / maximum<int64_t>(1, n * block_rows_ * 4)) * block_rows_;
    auto* norm = reinterpret_cast<RowNormFn*>(counted_kernel("row_norm", "f32"));
    parallel(static_cast<int>(minimum<int64_t>(max_threads_, row_blocks_)), [&](int thread, int threads) {
      const GemmRange blocks = share(row_blocks_, threads, thread);
      const int64_t group_blocks = group / block_rows_;
      const Scratch scratch(static_cast<size_t>(minimum(group, (blocks.end - blocks.begin) * block_rows_) * n * 4));
      GemmCall inner = norm_input_call(scratch.as<float>());
      for (int64_t b = blocks.begin; b < blocks.end; b += group_blocks) {
        const int64_t end = minimum(b + group_blocks, blocks.end), first = b * block_rows_;
        compute(inner, {b, end}, {0, call_.weight.panels}, first);
        norm(call_, scratch.as<float>(), first, 0, minimum(end * block_rows_, call_.m) - first);
      }
    });
  }

  // Few rows: all threads share them, so the norm waits for the last of them.
  void run_norm_in_two_steps() {
    auto* norm = reinterpret_cast<RowNormFn*>(counted_kernel("row_norm", "f32"));
    const Scratch scratch(static_cast<size_t>(call_.m * call_.weight.n * 4));
    const GemmCall inner = norm_input_call(scratch.as<float>());
    parallel(grid_rows_ * grid_panels_, [&](int thread, int) {
      const GemmRange rows = share(row_blocks_, grid_rows_, thread / grid_panels_);
      const GemmRange panels = share(call_.weight.panels, grid_panels_, thread % grid_panels_);
      compute(inner, rows, panels, 0);
    });
    parallel(static_cast<int>(minimum<int64_t>(max_threads_, call_.m)), [&](int thread, int threads) {
      const GemmRange rows = share(call_.m, threads, thread);
      norm(call_, scratch.as<float>(), 0, rows.begin, rows.end);
    });
  }

  GemmCall norm_input_call(float* values) const {
    GemmCall inner = call_;
    inner.epilogue.out = values;
    inner.epilogue.out_dtype = DType::f32;
    inner.epilogue.out_row_stride = call_.weight.n;
    return inner;
  }

  // What a thread has at hand for one row chunk.
  struct Chunk {
    const GemmCall* call;
    GemmRange rows;   // row blocks
    int64_t out_row_offset;
    uint8_t* a;       // copies [k block][row block][kBlockBytes]
    uint8_t* acc;     // partial sums [row block][panel of the chunk][kAccBytes]
    int32_t* row_sums;
    bool copied;      // A is all there
  };

  void compute(const GemmCall& call, GemmRange rows, GemmRange panels, int64_t out_row_offset) const {
    [[maybe_unused]] const typename Block::Scope scope;
    const int64_t chunk_blocks = minimum(chunk_row_blocks_, rows.end - rows.begin);
    const int64_t chunk_panels = panel_step(rows);
    const int64_t acc_blocks = k_blocks_ == 1 || chunk_panels == 1 ? chunk_blocks : chunk_blocks * chunk_panels;
    const Scratch a(static_cast<size_t>(chunk_blocks * k_blocks_ * kBlockBytes));
    const Scratch acc(static_cast<size_t>(acc_blocks * kAccBytes));
    const Scratch row_sums(static_cast<size_t>(chunk_blocks * Block::kRows * 4));
    for (int64_t row = rows.begin; row < rows.end; row += chunk_blocks) {
      Chunk chunk{&call, {row, minimum(row + chunk_blocks, rows.end)}, out_row_offset, a.as<uint8_t>(),
                  acc.as<uint8_t>(), row_sums.as<int32_t>(), false};
      for (int64_t panel = panels.begin; panel < panels.end; panel += chunk_panels) {
        panel_chunk(chunk, {panel, minimum(panel + chunk_panels, panels.end)}, panels.end);
        chunk.copied = true;
      }
    }
  }

  int64_t panel_step(GemmRange rows) const { return rows.end - rows.begin == 1 ? 1 : kChunkPanels; }

  void panel_chunk(const Chunk& chunk, GemmRange panels, int64_t last_panel) const {
    for (int64_t kb = 0; kb < maximum<int64_t>(k_blocks_, 1); ++kb) {
      for (int64_t rb = chunk.rows.begin; rb < chunk.rows.end; ++rb) {
        if (!chunk.copied) copy_a(chunk, rb, kb);
        for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
          step(chunk, panels, last_panel, kb, rb, panel);
        }
      }
    }
  }

  int64_t rows_of(int64_t rb) const { return minimum(block_rows_, call_.m - rb * block_rows_); }

  void copy_a(const Chunk& chunk, int64_t rb, int64_t kb) const {
    const int64_t rows = rows_of(rb), k = call_.weight.k, k0 = kb * k_block_tiles_ * Block::kTileK;
    const int64_t padded = minimum(k_block_tiles_, call_.weight.k_tiles - kb * k_block_tiles_) * Block::kTileK;
    const int64_t count = minimum(k - k0, padded);
    A* to = reinterpret_cast<A*>(a_copy(chunk, rb, kb));
    for (int64_t row = 0; row < rows; ++row) {
      copy_row<Block>(view_, rb * block_rows_ + row, k0, count, padded, to + row * Block::kStride);
    }
    if constexpr (!Block::kEvenRows) {
      // Tiles always have all their rows: the missing ones are zeros, not what a former call left.
      for (int64_t row = rows; row < round_up(rows, kTileRows); ++row) {
        __builtin_memset(to + row * Block::kStride, 0, static_cast<size_t>(padded) * sizeof(A));
      }
    }
    if constexpr (Block::kIsInt) {
      if (call_.weight.zero_point != nullptr) add_row_sums(chunk, rb, kb, k0, count);
    }
  }

  void add_row_sums(const Chunk& chunk, int64_t rb, int64_t kb, int64_t k0, int64_t count) const {
    int32_t* sums = chunk.row_sums + (rb - chunk.rows.begin) * Block::kRows;
    for (int64_t row = 0; row < rows_of(rb); ++row) {
      const Run run = view_.run(rb * block_rows_ + row, k0);
      const int32_t sum = sum_run<typename Block::Round>(run.data, count);
      sums[row] = kb == 0 ? sum : sums[row] + sum;
    }
  }

  uint8_t* a_copy(const Chunk& chunk, int64_t rb, int64_t kb) const {
    return chunk.a + (kb * (chunk.rows.end - chunk.rows.begin) + rb - chunk.rows.begin) * kBlockBytes;
  }

  void step(const Chunk& chunk, GemmRange panels, int64_t last_panel, int64_t kb, int64_t rb, int64_t panel) const {
    const GemmCall& call = *chunk.call;
    const PackedWeight& w = call.weight;
    const int64_t slice = k_block_tiles_ * 2 * kTileBytes;
    const int64_t row_index = rb - chunk.rows.begin, row_count = chunk.rows.end - chunk.rows.begin;
    // With one k block the sums are used up at once, and one block's worth of L1 serves all.
    const int64_t acc_index = k_blocks_ == 1 ? 0 : row_index * (panels.end - panels.begin) + panel - panels.begin;
    BlockCall block;
    block.a = a_copy(chunk, rb, kb);
    block.a_stride = Block::kStride * static_cast<int64_t>(sizeof(A));
    block.b = w.panel_data + panel * w.panel_bytes + kb * slice;
    block.k_tiles = minimum(k_block_tiles_, w.k_tiles - kb * k_block_tiles_);
    block.acc = chunk.acc + acc_index * kAccBytes;
    block.accumulate = kb > 0;
    add_prefetches(block, chunk, panels, last_panel, kb, rb, panel);
    Block::run(rows_of(rb), block);
    if (kb + 1 < k_blocks_) return;

    const int64_t width = w.gated ? kTileColumns : kPanelColumns;
    EpilogueBlock done;
    done.acc = block.acc;
    done.row = rb * block_rows_;
    done.out_row = done.row - chunk.out_row_offset;
    done.panel = panel;
    done.column = panel * width;
    done.columns = minimum(width, w.n - done.column);
    done.row_sums = chunk.row_sums + row_index * Block::kRows;
    done.a_offset = Block::kOffset;
    epilogue_(call, done, 0, rows_of(rb));
  }

  void add_prefetches(BlockCall& block, const Chunk& chunk, GemmRange panels, int64_t last_panel, int64_t kb,
                      int64_t rb, int64_t panel) const {
    block.prefetch_count = 0;
    if (block.k_tiles == 0) return;
    prefetch_weights(block, chunk, panels, last_panel, kb, rb, panel);
    if (!chunk.copied) prefetch_a(block, chunk, panels, kb, rb, panel);
    if (kb + 1 == k_blocks_) prefetch_output(block, *chunk.call, rb, panel, chunk.out_row_offset);
  }

  // The slice after this one: of the same panel at the next k, or of the next chunk's at the first. Each row block
  // fetches its share of it.
  void prefetch_weights(BlockCall& block, const Chunk& chunk, GemmRange panels, int64_t last_panel, int64_t kb,
                        int64_t rb, int64_t panel) const {
    const PackedWeight& w = call_.weight;
    const int64_t slice = k_block_tiles_ * 2 * kTileBytes;
    const bool same_panel = kb + 1 < k_blocks_;
    const int64_t next_panel = same_panel ? panel : panel + (panels.end - panels.begin);
    if (next_panel >= last_panel) return;
    const int64_t row_count = chunk.rows.end - chunk.rows.begin;
    const int64_t lines = (2 * kTileBytes / 64 + row_count - 1) / row_count;  // for each k step
    const int64_t offset = (rb - chunk.rows.begin) * lines * 64 * k_block_tiles_;
    if (offset >= slice) return;
    const uint8_t* from = w.panel_data + next_panel * w.panel_bytes + (same_panel ? (kb + 1) * slice : 0) + offset;
    block.prefetches[block.prefetch_count++] = {from, lines * 64, 64, lines, false};
  }

  // The rows that will be copied next, a share of them for each panel; a k step of them is a cache line or two.
  void prefetch_a(BlockCall& block, const Chunk& chunk, GemmRange panels, int64_t kb, int64_t rb,
                  int64_t panel) const {
    int64_t next_rb = rb + 1, next_kb = kb;
    if (next_rb == chunk.rows.end) {
      next_rb = chunk.rows.begin;
      if (++next_kb == k_blocks_) return;
    }
    const GemmRange rows = share(rows_of(next_rb), panels.end - panels.begin, panel - panels.begin);
    if (rows.begin == rows.end) return;
    const int64_t step = Block::kTileK * dtype_size(call_.a.dtype);
    const Run run = view_.run(next_rb * block_rows_ + rows.begin, next_kb * k_block_tiles_ * Block::kTileK);
    block.prefetches[block.prefetch_count++] = {run.data, step, call_.a.row_stride * dtype_size(call_.a.dtype),
                                                rows.end - rows.begin, false};
  }

  // The lines that the epilogue will write right after this block, and those of `other` that it will read.
  void prefetch_output(BlockCall& block, const GemmCall& call, int64_t rb, int64_t panel, int64_t row_offset) const {
    const Epilogue& e = call.epilogue;
    const int64_t column = panel * (call.weight.gated ? kTileColumns : kPanelColumns);
    const int64_t rows = (rows_of(rb) + block.k_tiles - 1) / block.k_tiles;  // for each k step
    auto add = [&](const void* data, DType dtype, int64_t row, int64_t stride, bool for_writing) {
      const int64_t bytes = stride * dtype_size(dtype);
      const auto* first = static_cast<const uint8_t*>(data) + row * bytes + column * dtype_size(dtype);
      block.prefetches[block.prefetch_count++] = {first, rows * bytes, bytes, rows, for_writing};
    };
    add(e.out, e.out_dtype, rb * block_rows_ - row_offset, e.out_row_stride, true);
    if (e.binary != Binary::none && e.other_row_stride != 0) {
      add(e.other, e.other_dtype, rb * block_rows_, e.other_row_stride, false);
    }
  }

  const GemmCall& call_;
  Merged view_;
  int64_t row_blocks_, block_rows_, k_blocks_, k_block_tiles_, chunk_row_blocks_;
  int64_t grid_rows_ = 1, grid_panels_ = 1, max_threads_ = 1;
  bool norm_;
  EpilogueFn* epilogue_ = nullptr;
};

template <class Block>
void gemm_with(const GemmCall& call) {
  if (call.m > 0 && call.weight.n > 0) GemmLoop<Block>(call).run();
}

}  // namespace xopt::XOPT_ISA
