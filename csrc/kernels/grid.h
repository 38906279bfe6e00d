// Which thread computes what of a product, or of many: a grid of row blocks x panels.
#pragma once

#include "kernels/each_item.h"
#include "kernels/gemm_plan.h"
#include "runtime/shared_parts.h"

namespace xopt::XOPT_ISA {

// Parts of equal size, which threads take over from each other in pieces (runtime/shared_parts.h).
class Grid {
 public:
  template <class Block>
  Grid(const GemmPlan<Block>& plan, const PackedWeight& w, int64_t products, int64_t grid_rows, int64_t grid_panels)
      : products_(products),
        grid_rows_(grid_rows),
        grid_panels_(grid_panels),
        row_blocks_(plan.row_blocks),
        panels_(w.panels) {
    const int64_t most_rows = ceil_div(row_blocks_, grid_rows_), most_panels = ceil_div(panels_, grid_panels_);
    // A piece of rows reads all of the part's weights, one of panels all of its A: rather what L2 holds.
    const bool weights_stay = most_panels * w.panel_bytes <= plan.most_resident;
    by_rows_ = most_rows > most_panels || (weights_stay && most_rows >= kFewPieces);
    // What it takes to begin anew has to be little beside a piece; with AMX copies of A are begun as well.
    constexpr int64_t kStepCycles = Block::kBackground ? 80 : 200, kLeastCycles = Block::kBackground ? 60000 : 15000;
    const int64_t unit_cycles = (by_rows_ ? most_panels : most_rows) * maximum<int64_t>(1, w.k_tiles) * kStepCycles;
    least_ = kLeastCycles / unit_cycles + 1;
    if (!by_rows_) {
      // Rows that L2 does not hold come in anew for each piece: two of them (1024 x 768 x 3072 1.03 times as fast).
      const bool rows_stay = most_rows * plan.block_rows * plan.bytes_of_rows(w.k_tiles) <= l2_bytes();
      least_ = maximum(least_, most_panels / (rows_stay ? 4 : 2));
    } else if (weights_stay) {
      // A row block by itself would go through its weights as if it were alone with them.
      least_ = maximum<int64_t>(maximum(least_, most_rows / kFewPieces), Block::kBackground ? 1 : 2);
    } else {
      least_ = maximum(least_, ceil_div(most_rows, 2));
    }
  }

  // compute(product, row blocks, panels, the end of the part's panels) for all there are, on up to so many threads.
  template <class Compute>
  void each(int64_t threads, const Compute& compute) const {
    if (products_ > 1) return each_of_many(threads, compute);
    const int64_t parts = grid_rows_ * grid_panels_;
    SharedParts shared(parts, least_);
    for (int64_t part = 0; part < parts; ++part) {
      const Range whole = by_rows_ ? rows_of(part) : panels_of(part);
      shared.set(part, whole.begin, whole.end);
    }
    parallel_for_some(static_cast<int>(minimum(parts, threads)), [&](int thread, int count) {
      shared.each(thread, count, [&](int64_t part, int64_t begin, int64_t end) {
        const Range piece{begin, end};
        compute(0, by_rows_ ? piece : rows_of(part), by_rows_ ? panels_of(part) : piece, panels_of(part).end);
      });
    });
  }

 private:
  static constexpr int64_t kFewPieces = 8;

  // Of several products threads take over whole parts, of which there may be thousands.
  template <class Compute>
  void each_of_many(int64_t threads, const Compute& compute) const {
    const int64_t parts_of_product = grid_rows_ * grid_panels_;
    const auto compute_part = [&](int64_t part) {
      compute(part / parts_of_product, rows_of(part), panels_of(part), panels_of(part).end);
    };
    for_each_item(products_ * parts_of_product, threads, [&] { return compute_part; });
  }

  Range rows_of(int64_t part) const { return share(row_blocks_, grid_rows_, part / grid_panels_ % grid_rows_); }
  Range panels_of(int64_t part) const { return share(panels_, grid_panels_, part % grid_panels_); }

  int64_t products_, grid_rows_, grid_panels_;  // parts
  int64_t row_blocks_, panels_;                 // of a product
  bool by_rows_;                                // what pieces are cut along
  int64_t least_;                               // row blocks or panels of a piece
};

}  // namespace xopt::XOPT_ISA
