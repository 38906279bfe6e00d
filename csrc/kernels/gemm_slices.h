// The loops of a product whose k goes by slices so short that a panel's weights for one stay in L1, at level `amx`.
//
//   thread        a rectangle of the output: a range of row blocks x a range of panels
//    row chunk     row blocks whose rows of a slice stay in L2
//     strip         panels whose sums wait for the next slice, in L2 or L3
//      slice         a part of k
//       panel         its weights come to L1 with the first row block
//        row block     the block's product; its sums are on their way to L1 while the block before is multiplied
//
// Of a step's operands half come from L1, which leaves room for what comes from memory meanwhile: the sums, 8 KB a block,
// take less than what rows and weights of long k from L2 and beyond do (csrc/README.md).
#pragma once

#include <type_traits>

#include "kernels/column_values.h"
#include "kernels/gemm_background.h"
#include "kernels/gemm_plan.h"
#include "kernels/panel_output.h"
#include "kernels/slice_rows.h"
#include "runtime/arena.h"
#include "tiles/block_amx.h"
#include "tiles/view.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

template <class Block, class View = Merged>
class GemmSlices {
  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4, kLinesOfSums = kAccBytes / 64;
  // Of few row blocks, whose weights take most of the way into L1, sums had better be in L2.
  static constexpr int64_t kFewRowBlocks = 9, kPanelsOfFewRows = 4, kMostPanels = 64;
  using Output = PanelOutput<typename Block::Acc>;

 public:
  // `plan`: of a group of rows, which begins at the product's row `first_row`. `out_row_offset`: the row that row 0 of
  // epilogue.out is.
  GemmSlices(const GemmCall& call, const SliceRows<Block, View>& a, const GemmPlan<Block>& plan, EpilogueFn* epilogue,
             int64_t first_row, int64_t out_row_offset)
      : call_(call),
        w_(call.weight),
        a_(a),
        plan_(plan),
        first_row_(first_row),
        background_(epilogue, out_row_offset),
        finishes_panels_(Output::finishes(call)),
        output_(call, out_row_offset) {}

  // `weights_end`: the panel before which weights are worth fetching: a piece more of the same part may come next.
  void compute(Range rows, Range panels, int64_t weights_end) {
    const typename Block::Scope scope;
    weights_end_ = weights_end;
    const int64_t most_rows = maximum<int64_t>(1, l2_bytes() / 4 / (Block::kRows * Block::kMaxTiles * 64));
    const int64_t chunk = even_share(rows.size(), most_rows);
    const bool few = rows.size() > 1 && rows.size() < kFewRowBlocks;  // of one, rows of a slice stay in L1 as well
    const int64_t strip = even_share(panels.size(), few ? kPanelsOfFewRows : kMostPanels);
    const Scratch acc(static_cast<size_t>(chunk * strip * kAccBytes));
    const Scratch columns(static_cast<size_t>(finishes_panels_ ? panels.size() * Output::kColumnBytes : 0));
    if (finishes_panels_) output_.begin(panels, columns.as<uint8_t>());
    acc_ = acc.as<uint8_t>();
    for (int64_t row = rows.begin; row < rows.end; row += chunk) {
      rows_ = {row, minimum(row + chunk, rows.end)};
      for (int64_t panel = panels.begin; panel < panels.end; panel += strip) {
        panels_ = {panel, minimum(panel + strip, panels.end)};
        compute_strip();
      }
      finish();  // before sums of rows are overwritten
    }
  }

 private:
  void compute_strip() {
    finish();
    for (int64_t slice = 0; slice < plan_.k_blocks; ++slice) {
      for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
        for (int64_t rb = rows_.begin; rb < rows_.end; ++rb) step(slice, panel, rb);
      }
    }
  }

  void step(int64_t slice, int64_t panel, int64_t rb) {
    BlockCall block;
    block.kept = &kept_;
    block.k_tiles = plan_.tiles_of(slice, w_.k_tiles);
    block.accumulate = slice > 0;
    block.b = weights(panel, slice);
    block.acc = sums(rb, panel);
    a_.set(rb, slice, &block);
    fetch_ahead(slice, panel, rb, &block);
    const bool last = slice + 1 == plan_.k_blocks;
    const int64_t rows = plan_.rows_of(rb);
    background_.prefetches.clear();
    if (last && !finishes_panels_) {
      background_.prefetches.add_other(call_.epilogue, first_row(rb), rows, first_column(panel), block.k_tiles);
    }
    background_.begin_block();
    if (finishes_panels_) {
      output_.template run<Block>(rows, block, background_);
    } else {
      Block::run(rows, block, background_);
    }
    if (!last) return;
    if (finishes_panels_) {
      output_.defer(block.acc, {first_row(rb)}, rows, panel, next_panel(rb, panel));
    } else {
      finish_sums(rb, panel, block);
    }
  }

  int64_t first_column(int64_t panel) const { return panel * (w_.gated ? kTileColumns : kPanelColumns); }
  int64_t first_row(int64_t rb) const { return first_row_ + plan_.first_row(rb); }
  int64_t first_tile(int64_t slice) const { return slice * plan_.k_block_tiles; }

  const uint8_t* weights(int64_t panel, int64_t slice) const {
    return w_.panel_data + panel * w_.panel_bytes + first_tile(slice) * 2 * kTileBytes;
  }

  // A panel's row blocks follow each other, as they are multiplied.
  uint8_t* sums(int64_t rb, int64_t panel) const {
    return acc_ + ((panel - panels_.begin) * rows_.size() + rb - rows_.begin) * kAccBytes;
  }

  // The weights wanted next, each row block its share of them, and the next block's sums.
  void fetch_ahead(int64_t slice, int64_t panel, int64_t rb, BlockCall* block) const {
    const bool more = rb + 1 < rows_.end || panel + 1 < panels_.end;
    block->sums_ahead = more ? sums(rb + 1, panel) : acc_;
    block->sums_lines = ceil_div(kLinesOfSums, block->k_tiles);
    if (++panel == panels_.end) {
      if (++slice < plan_.k_blocks) {
        panel = panels_.begin;
      } else {
        slice = 0;
      }
    }
    if (panel >= weights_end_) return;
    const int64_t lines = lines_ahead(rows_.size()), done = (rb - rows_.begin) * lines * 64;
    if (done >= 2 * kTileBytes) return;
    block->ahead = weights(panel, slice) + done * block->k_tiles;
    block->ahead_lines = lines;
  }

  // Hands a block's finished sums to the epilogue.
  void finish_sums(int64_t rb, int64_t panel, const BlockCall& block) {
    EpilogueStrip done = strips_.next(call_.epilogue, w_, {panel, panel + 1}, block.acc);
    done.row_sums = a_.row_sums(rb);
    done.a_offset = Block::kOffset;
    background_.defer_epilogue(&call_, done, plan_.rows_of(rb), block.k_tiles, {first_row(rb)});
  }
  NextPanel next_panel(int64_t rb, int64_t panel) const {
    if (rb + 1 < rows_.end) return output_.next(first_row(rb + 1) - first_row(rb), 0, true);
    if (panel + 1 == panels_.end) return {};
    return output_.next(first_row(rows_.begin) - first_row(rb), 1, true);
  }

  // What still waits, before sums are overwritten.
  void finish() {
    Block::store(kept_);
    background_.finish_epilogue();
    output_.finish();
  }

  const GemmCall& call_;
  const PackedWeight& w_;
  const SliceRows<Block, View>& a_;
  const GemmPlan<Block>& plan_;
  const int64_t first_row_;
  Background<NothingToCopy> background_;
  const bool finishes_panels_;  // a panel at a time, by themselves
  Output output_;

  uint8_t* acc_ = nullptr;
  KeptSums kept_;
  Strips<Block> strips_;
  Range rows_{}, panels_{};  // the chunk, the strip
  int64_t weights_end_ = 0;
};

}  // namespace xopt::XOPT_ISA
#endif
