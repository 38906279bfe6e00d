// Rows of A for a product whose k goes by slices (gemm_slices.h): where they are, or copies that all threads share.
#pragma once

#include <type_traits>

#include "kernels/gemm_background.h"
#include "kernels/gemm_plan.h"
#include "kernels/rows_in_place.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Whether rows of A all begin in the same set of L1, of which a tile has more than it holds: slices of them are copied (256 x
// 1280 x 5120 took 1.1 times, 512 x 1024 x 4096 1.3 times as long in place).
inline bool rows_begin_in_one_set(const EvenRows& rows) { return rows.step != 0 && rows.step % (kSetsOfL1 * 64) == 0; }

// Rows that slices are read from where they are; a step of 0: none.
template <class Block, class View>
EvenRows slices_in_place(const View& view, const PackedWeight& w, int64_t rows) {
  if constexpr (std::is_same_v<View, Merged>) {
    const EvenRows in_place = tiles_in_place<Block>(view, w, rows);
    if (!rows_begin_in_one_set(in_place)) return in_place;
  }
  return {};
}

// A group of a product's rows.
template <class Block, class View>
class SliceRows {
 public:
  // `plan`: of the group alone, which begins at `first_row`. Whatever is copied has been when this returns.
  SliceRows(const GemmCall& call, const View& view, const GemmPlan<Block>& plan, int64_t first_row)
      : w_(call.weight),
        view_(view),
        plan_(plan),
        first_row_(first_row),
        in_place_(slices_in_place<Block>(view, w_, plan.rows)),
        first_copied_(in_place_.step == 0 ? 0 : plan.rows / kTileRows * kTileRows / Block::kRows),
        copied_(plan.row_blocks - first_copied_),
        copies_(static_cast<size_t>(copied_ * plan.k_blocks * kCopyBytes<Block>)),
        row_sums_(static_cast<size_t>(w_.zero_point != nullptr ? plan.row_blocks * Block::kRows * 4 : 0)) {
    if (in_place_.step != 0 && plan.rows % kTileRows == 0) copied_ = 0;
    if (copied_ == 0) return;
    // Slice by slice, since row blocks may be fewer than threads, but where a row's values are summed up over all slices.
    const int64_t parts = w_.zero_point != nullptr ? 1 : plan.k_blocks, units = copied_ * parts;
    parallel(static_cast<int>(minimum(plan.max_threads, units)), [&](int thread, int threads) {
      const Range mine = share(units, threads, thread);
      for (int64_t i = mine.begin; i < mine.end; ++i) {
        copy(first_copied_ + i / parts, share(plan.k_blocks, parts, i % parts));
      }
    });
  }

  // Points the block at the rows of a row block and a slice.
  XOPT_INLINE void set(int64_t rb, int64_t slice, BlockCall* block) const {
    if (rb < first_copied_ || copied_ == 0) {
      block->a = in_place_.data + (first_row_ + plan_.first_row(rb)) * in_place_.step + first_tile(slice) * 64;
      block->a_stride = in_place_.step;
    } else {
      block->a = copy_of(rb, slice);
    }
  }
  // Of a weight with zero points.
  int32_t* row_sums(int64_t rb) const { return row_sums_.template as<int32_t>() + rb * Block::kRows; }

 private:
  int64_t first_tile(int64_t slice) const { return slice * plan_.k_block_tiles; }
  uint8_t* copy_of(int64_t rb, int64_t slice) const {
    return copies_.template as<uint8_t>() + (slice * copied_ + rb - first_copied_) * kCopyBytes<Block>;
  }

  void copy(int64_t rb, Range slices) const {
    for (int64_t slice = slices.begin; slice < slices.end; ++slice) {
      const int64_t k = first_tile(slice) * Block::kTileK;
      BlockCopier<Block, View> copier;
      copier.source = view_.rows(first_row_ + plan_.first_row(rb), k);
      copier.to = reinterpret_cast<typename Block::A*>(copy_of(rb, slice));
      copier.row_sums = w_.zero_point != nullptr ? row_sums(rb) : nullptr;
      copier.first_k = slice == 0;
      copier.rows = plan_.rows_of(rb);
      copier.padded = plan_.tiles_of(slice, w_.k_tiles) * Block::kTileK;
      copier.count = minimum(w_.k - k, copier.padded);
      copier.copy_rows(0, round_up(plan_.rows_of(rb), kTileRows));
    }
  }

  const PackedWeight& w_;
  const View view_;
  const GemmPlan<Block>& plan_;
  const int64_t first_row_;
  const EvenRows in_place_;
  int64_t first_copied_, copied_;  // row blocks: the last one, if it ends within a tile, or all
  const Scratch copies_, row_sums_;
};

}  // namespace xopt::XOPT_ISA
