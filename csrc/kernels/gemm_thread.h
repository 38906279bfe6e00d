// The loops around a block: who computes what, in which order, and what lies in which cache meanwhile.
//
//   thread        a rectangle of the output: a range of row blocks x a range of panels (no split of K, so results do not
//                 depend on the number of threads)
//    row chunk    rows whose copy of A stays in L2; weights are read once per chunk
//     panel chunk   panels whose weights stay in L2 while all rows of the chunk pass: all their K, or one k block of it
//      pass           the k blocks that a row block goes through in one go: all, or one
//       row block
//        k block        its copy of A stays in L1 while the panels of the chunk pass; AMX takes it from L2 and has one
//         panel           the block's product; sums wait in scratch for the next k block
//
// Tiles are read from A itself where its rows are what a copy would be: bf16 or int8, whole tiles, at whole cache lines.
// So are floats that fp32 weights meet, unless their rows meet in few sets of L1, and all rows of a view with kInPlace,
// which says where they and their pieces begin. Blocks of floats do simple epilogues themselves, in their registers; others
// on the vector ports finish a row block's strip of sums, all panels of the chunk, after its last k block. With AMX each
// panel's sums go to the epilogue on their own, between the products of the next panel (simple ones by panel_output.h), and
// the weights of the next chunk are fetched into L2 meanwhile, spread evenly over the k steps; where all panels are one
// chunk, the next panel's while the first row block passes. Vector blocks too fetch the next chunk's, each row block its
// share; the first chunk's, and weights that stay, are fetched by the first row block just before it wants them.
// With AMX and many row blocks it is the other way round (GemmPlan::keeps_weights): a chunk has as many panels as L2 holds,
// its first row block fetches the next panel's weights, and rows of A stream by.
// With AMX, long products whose weights L2 does not hold go another way: gemm_slices.h.
// A call with one row block goes panel by panel, so that weights stream in their order in memory.
#pragma once

#include <type_traits>

#include "kernels/column_values.h"
#include "kernels/gemm_background.h"
#include "kernels/gemm_plan.h"
#include "kernels/panel_output.h"
#include "kernels/rows_in_place.h"
#include "kernels/simple_epilogue.h"
#include "runtime/arena.h"
#include "tiles/block_amx.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// A thread's part of a call. The rows of A are those of `view`, whatever call.a says.
template <class Block, class View = Merged>
class GemmThread {
  using A = typename Block::A;
  static constexpr int64_t kAccBytes = Block::kRows * kPanelColumns * 4;
  using Output = PanelOutput<typename Block::Acc>;

 public:
  // `out_row_offset`: the output row that row 0 of epilogue.out is.
  GemmThread(const GemmCall& call, const View& view, const GemmPlan<Block>& plan, EpilogueFn* epilogue,
             int64_t out_row_offset)
      : call_(call),
        w_(call.weight),
        plan_(plan),
        view_(view),
        background_(epilogue, out_row_offset),
        out_row_offset_(out_row_offset),
        finishes_(can_finish(call)),
        finishes_panels_(Block::kBackground && Output::finishes(call)),
        panel_output_(call, out_row_offset) {}

  // `weights_end`: the panel before which weights are worth fetching: a piece more of the same part may come next.
  void compute(Range rows, Range panels, int64_t weights_end) {
    [[maybe_unused]] const typename Block::Scope scope;
    part_ = panels;
    weights_end_ = weights_end;
    first_row_block_ = rows.begin;
    columns_ = {};
    weights_stay_ = !Block::kBackground && rows.size() > 1 && panels.size() * w_.panel_bytes <= plan_.most_resident;
    keep_copies_ = Block::kBackground || weights_stay_;
    weights_are_far_ = !Block::kBackground && rows.size() > 1 && begins_weights(rows, panels);
    const int64_t chunks = ceil_div(rows.size(), most_chunk_blocks());
    const int64_t chunk_blocks = weights_stay_ ? 1 : ceil_div(rows.size(), maximum<int64_t>(1, chunks));
    const bool one_panel = rows.size() == 1 || (weights_stay_ && plan_.panel_by_panel && !finishes_);
    int64_t most_panels = weights_stay_ ? maximum(plan_.chunk_panels, plan_.kOnePassPanels) : plan_.chunk_panels;
    if (plan_.keeps_weights) most_panels = even_share(panels.size(), most_panels);  // a piece is not all of the part
    const int64_t chunk_panels = one_panel ? 1 : most_panels;
    pass_k_blocks_ = rows.size() == 1 || weights_stay_ ? plan_.k_blocks : plan_.pass_k_blocks;
    strip_bytes_ = chunk_panels * kAccBytes;
    // Strips of all row blocks if sums have to wait for another pass, else two in turns; two at least, because the
    // deferred epilogue reads one while the next is computed.
    const int64_t strips = maximum<int64_t>(2, pass_k_blocks_ < plan_.k_blocks ? chunk_blocks : 0);
    const Scratch acc(static_cast<size_t>(by_panels() ? 2 * kAccBytes : strips * strip_bytes_));
    copies_ = keep_copies_ ? chunk_blocks * plan_.k_blocks : 1;
    // Copies that no other panels ask for: one that is multiplied, and the next. Those of all rows, far apart for the longest
    // rows that a block takes, would leave L1 and L2 (3136 x 144 x 24 on AMX took 178 us, and 47 with rows in place).
    if (Block::kBackground && panels.size() <= chunk_panels) copies_ = minimum<int64_t>(copies_, 2);
    const Scratch a(static_cast<size_t>(copies_ * kCopyBytes<Block>));
    const Scratch row_sums(static_cast<size_t>(chunk_blocks * Block::kRows * 4));
    const Scratch columns(static_cast<size_t>(finishes_panels_ ? panels.size() * Output::kColumnBytes : 0));
    if constexpr (Block::kBackground) {
      if (finishes_panels_) panel_output_.begin(panels, columns.as<uint8_t>());
    }
    fetches_output_ = fetches_output();
    acc_ = acc.as<uint8_t>();
    a_ = a.as<uint8_t>();
    row_sums_ = row_sums.as<int32_t>();
    const bool lie_alike =
        finishes_ && weights_stay_ && in_place_.step != 0 && plan_.k_blocks == 1 && panels.size() <= chunk_panels;
    for (int64_t row = rows.begin; row < rows.end; row += chunk_blocks) {
      if (lie_alike && row > rows.begin) {
        finish_row_blocks({row, rows.end});
        break;
      }
      rows_ = {row, minimum(row + chunk_blocks, rows.end)};
      weight_lines_ = lines_ahead(rows_.size());
      copied_ = false;
      for (int64_t panel = panels.begin; panel < panels.end; panel += chunk_panels) {
        panels_ = {panel, minimum(panel + chunk_panels, panels.end)};
        panel_chunk();
        copied_ = keep_copies_;
      }
      finish_epilogue();  // before row sums and the copy of A are overwritten
    }
    if constexpr (Block::kBackground) panel_output_.finish();
  }

 private:
  // A k block of a row block.
  struct Place {
    int64_t rb, kb;
  };

  static bool can_finish(const GemmCall& call) {
    if constexpr (Block::kFinishes) return finishes_simply(call, Block::kFinishedDType);
    return false;
  }

  // What a thread writes, which then has to come back to be written. With tiles 16 x 56 x 56 x 256 gained a fifth by being
  // fetched. What stays in L2 gains where sums are short (3136 x 256 x 64 a tenth), and nothing where they are long.
  bool fetches_output() const {
    constexpr int64_t kFewTiles = 8;
    const Epilogue& e = call_.epilogue;
    const int64_t bytes = call_.m * w_.n / (plan_.grid_rows * plan_.grid_panels) * dtype_size(e.out_dtype);
    if (Block::kBackground) {
      const bool pays = bytes > l2_bytes() || w_.k_tiles <= kFewTiles;
      return finishes_panels_ && e.out_dtype == DType::bf16 && pays;
    }
    return e.positions == nullptr && bytes > l2_bytes() / 2;
  }

  int64_t most_chunk_blocks() const {
    if (!Block::kBackground || in_place_.step != 0) return plan_.chunk_blocks;
    return minimum(plan_.chunk_blocks, maximum<int64_t>(4, kMostCopyBytes / (plan_.k_blocks * kCopyBytes<Block>)));
  }

  void panel_chunk() {
    Place place{rows_.begin, 0};
    if (!copied_) defer_copy(place);
    if (finishes_ && (columns_.bias == nullptr || columns_.panel != panels_.begin)) {
      columns_ = strips_.next(call_.epilogue, w_, panels_, nullptr);
    }
    bool more = true;
    while (more) {
      Place next = place;
      more = advance(&next);
      if (!copied_) {
        background_.finish_copy();
        if (more && next.kb < plan_.k_blocks) defer_copy(next);
      }
      // The former chunk's last sums may wait in a strip that is about to be used again.
      if (!takes_turns() && place.kb == 0 && place.rb == rows_.begin + 1) finish_epilogue();
      const bool last = place.kb + 1 == plan_.k_blocks;
      if (finishes_) {
        finish_panels(place);
      } else {
        for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
          step(place, panel);
          if (Block::kBackground && last && !finishes_panels_) finish_sums(place.rb, {panel, panel + 1});
        }
        if (!Block::kBackground && last) finish_sums(place.rb, panels_);
      }
      if (last && !by_panels()) turn_ ^= 1;
      place = next;
    }
  }

  // The next k block of the pass, or the next row block's first, or the next pass's; false at the end.
  bool advance(Place* place) const {
    // A division costs as much as a short product.
    const int64_t pass = pass_k_blocks_ == plan_.k_blocks ? 0 : place->kb / pass_k_blocks_ * pass_k_blocks_;
    if (++place->kb < minimum(pass + pass_k_blocks_, plan_.k_blocks)) return true;
    if (++place->rb < rows_.end) {
      place->kb = pass;
      return true;
    }
    place->rb = rows_.begin;
    return place->kb < plan_.k_blocks;
  }

  // Of a row block: a tile reads all of its rows.
  bool in_place(int64_t rb) const {
    return in_place_.step != 0 && (!Block::kBackground || plan_.rows_of(rb) % kTileRows == 0);
  }

  // Where a row block's rows begin in a view that says so.
  void set_rows(int64_t rb, BlockCall* block) {
    if (rb != placed_) view_.set_rows(plan_.first_row(rb), plan_.rows_of(rb), a_rows_);
    placed_ = rb;
    block->a = view_.data();
    block->a_stride = view_.step_bytes();
    block->a_rows = a_rows_;
  }

  const uint8_t* rows_in_place_at(int64_t rb, int64_t kb) const {
    return in_place_.data + plan_.first_row(rb) * in_place_.step + kb * plan_.k_block_tiles * 64;
  }

  void defer_copy(Place place) {
    if constexpr (!View::kInPlace) {
      if (!in_place(place.rb)) defer_block_copy(place);
    }
  }
  void defer_block_copy(Place place) {
    const int64_t rows = plan_.rows_of(place.rb);
    const int64_t k0 = place.kb * plan_.k_block_tiles * Block::kTileK;
    const int64_t tiles = plan_.tiles_of(place.kb, w_.k_tiles);
    BlockCopier<Block, View> copier;
    copier.source = view_.rows(plan_.first_row(place.rb), k0);
    copier.to = reinterpret_cast<A*>(a_copy(place.rb, place.kb));
    copier.row_sums = w_.zero_point != nullptr ? row_sums_ + (place.rb - rows_.begin) * Block::kRows : nullptr;
    copier.first_k = place.kb == 0;
    copier.rows = rows;
    copier.padded = tiles * Block::kTileK;
    copier.count = minimum(w_.k - k0, copier.padded);
    background_.defer_copy(copier, Block::kEvenRows ? rows : round_up(rows, kTileRows),
                           panels_.size() * plan_.k_block_tiles);
  }

  uint8_t* a_copy(int64_t rb, int64_t kb) const {
    const int64_t turn = kb * rows_.size() + rb - rows_.begin;
    return a_ + (copies_ > 2 ? turn : turn & (copies_ - 1)) * kCopyBytes<Block>;
  }

  const uint8_t* weights(int64_t panel, int64_t kb) const {
    return w_.panel_data + panel * w_.panel_bytes + kb * plan_.k_block_tiles * 2 * kTileBytes;
  }

  // Whether a panel's sums go to the epilogue on their own, while the next panel's are computed in other 4 KB: they never
  // leave L1. Otherwise those of all panels of a chunk wait for the next k block.
  bool by_panels() const { return Block::kBackground && pass_k_blocks_ == plan_.k_blocks; }

  uint8_t* sums(int64_t rb, int64_t panel) const {
    return by_panels() ? acc_ + turn_ * kAccBytes : strip(rb) + (panel - panels_.begin) * kAccBytes;
  }

  // Whether two strips in turns are enough. A chunk of one row block would meet its own last strip otherwise.
  bool takes_turns() const { return pass_k_blocks_ == plan_.k_blocks || rows_.size() == 1; }
  uint8_t* strip(int64_t rb) const { return acc_ + (takes_turns() ? turn_ : rb - rows_.begin) * strip_bytes_; }

  void finish_epilogue() {
    if constexpr (Block::kBackground) Block::store(kept_);
    background_.finish_epilogue();
  }

  // What all panels of a row block's k block have in common.
  BlockCall block_of(Place place) {
    BlockCall block;
    block.kept = &kept_;
    if constexpr (View::kInPlace) {
      set_rows(place.rb, &block);
    } else if (in_place(place.rb)) {
      block.a = rows_in_place_at(place.rb, place.kb);
      block.a_stride = in_place_.step;
    } else {
      block.a = a_copy(place.rb, place.kb);
    }
    block.k_tiles = plan_.tiles_of(place.kb, w_.k_tiles);
    block.accumulate = place.kb > 0;
    if (Block::kFinishes && place.kb + 1 == plan_.k_blocks) {
      block.last_rows = ceil_div(w_.k - (w_.k_tiles - 1) * Block::kTileK, Block::kTileK / kTileRows);
    }
    return block;
  }

  void find_prefetches(Place place, int64_t panel, BlockCall* block) {
    background_.prefetches.clear();
    if (block->k_tiles == 0) return;
    if (!weights_stay_) {
      prefetch_weights(place, panel, block);
      if constexpr (!View::kInPlace) {
        if (!copied_ && in_place_.step == 0 && place.kb < plan_.k_blocks) prefetch_a(place, panel);
      }
    }
    if (weights_are_far_ && place.rb == first_row_block_ && place.kb < pass_k_blocks_ &&
        (weights_stay_ || panels_.begin == part_.begin)) {
      prefetch_far_weights(*block);
    }
    if (!Block::kBackground && panel == part_.begin && in_place_.step != 0) prefetch_in_place(place);
    if constexpr (View::kInPlace) {
      if (panel == part_.begin) {
        const Prefetch lines = view_.lines_ahead(place.kb, plan_.k_blocks, block->k_tiles);
        if (lines.count > 0) background_.prefetches.add(lines);
      }
    }
    if (place.kb + 1 == plan_.k_blocks && !finishes_panels_) prefetch_epilogue(place.rb, panel, block->k_tiles);
  }

  // A row block's products with one panel.
  void step(Place place, int64_t panel) {
    BlockCall block = block_of(place);
    block.b = weights(panel, place.kb);
    block.acc = sums(place.rb, panel);
    block.backwards = w_.goes_backwards(panel);
    find_prefetches(place, panel, &block);
    if constexpr (View::kInPlace) view_.set_pieces(place.kb, &block);
    const int64_t rows = plan_.rows_of(place.rb);
    if constexpr (Block::kBackground) {
      background_.begin_block();
      if (finishes_panels_) return run_and_finish(rows, block, place, panel);
      Block::run(rows, block, background_);
    } else {
      Block::run(rows, block, background_.prefetches);
    }
  }

  // With all panels of the chunk, whose sums blocks finish themselves. Looked up anew for each panel, what these have in
  // common takes as long as the products of a convolution of 16 channels.
  void finish_panels(Place place) {
    if constexpr (Block::kFinishes) {
      BlockCall block = block_of(place);
      const int64_t row = plan_.first_row(place.rb), k_tiles = block.k_tiles;
      auto finish = finish_of<typename Block::Round>(call_.epilogue, columns_, row, row - out_row_offset_, 0);
      if (place.kb + 1 == plan_.k_blocks) block.finish = &finish;
      if constexpr (View::kInPlace) view_.set_pieces(place.kb, &block);
      const int64_t pieces = block.k_tiles;
      run_panels(place, &block, &finish, [&](int64_t panel) {
        block.k_tiles = k_tiles;
        find_prefetches(place, panel, &block);
        block.k_tiles = pieces;
      });
    }
  }

  // A row block's products with all panels of the chunk; find(panel) says what to fetch meanwhile.
  template <class Out, class Find>
  XOPT_INLINE void run_panels(Place place, BlockCall* block, Finish<Out>* finish, const Find& find) {
    const int64_t rows = plan_.rows_of(place.rb);
    block->b = weights(panels_.begin, place.kb);
    auto* acc = sums(place.rb, panels_.begin);
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      find(panel);
      block->columns = minimum(finish->columns, kPanelColumns);
      block->acc = acc;
      Block::run(rows, *block, background_.prefetches);
      acc += kAccBytes;
      block->b += w_.panel_bytes;
      finish->skip(kPanelColumns);
    }
  }

  // Row blocks whose rows lie in place, with all panels of the part, behind one that was done with these: nothing differs
  // but where they read and write. Looked up anew for each, the rest took a third of a short product's time (12544 x 16 x
  // 32 on AVX2).
  void finish_row_blocks(Range blocks) {
    if constexpr (Block::kFinishes && !View::kInPlace) {
      BlockCall block = block_of({blocks.begin, 0});
      const Epilogue& e = call_.epilogue;
      const auto at_first_row = finish_of<typename Block::Round>(e, columns_, 0, -out_row_offset_, 0);
      for (int64_t rb = blocks.begin; rb < blocks.end; ++rb) {
        rows_ = {rb, rb + 1};
        const int64_t row = plan_.first_row(rb);
        auto finish = at_first_row;
        finish.out += row * finish.out_stride;
        if (finish.other != nullptr) finish.other += row * finish.other_stride;
        block.a = in_place_.data + row * in_place_.step;
        block.finish = &finish;
        run_panels({rb, 0}, &block, &finish, [&](int64_t panel) {
          background_.prefetches.clear();
          if (panel == panels_.begin) prefetch_in_place({rb, 0});
          prefetch_epilogue(rb, panel, block.k_tiles);
        });
      }
    }
  }

  // A panel's products and, between them, the output of the panel before.
  void run_and_finish(int64_t rows, const BlockCall& block, Place place, int64_t panel) {
    panel_output_.template run<Block>(rows, block, background_);
    if (place.kb + 1 < plan_.k_blocks) return;
    const RowsInOrder outputs{plan_.first_row(place.rb)};
    panel_output_.defer(block.acc, outputs, rows, panel, next_panel(place.rb, panel));
    if (by_panels()) turn_ ^= 1;
  }

  NextPanel next_panel(int64_t rb, int64_t panel) const {
    if (panel + 1 < panels_.end) return panel_output_.next(0, 1, fetches_output_);
    if (rb + 1 >= rows_.end) return {};
    const int64_t rows = plan_.first_row(rb + 1) - plan_.first_row(rb);
    return panel_output_.next(rows, panels_.begin - panel, fetches_output_);
  }

  // The rows that no copy would bring in before their products: those after the chunk's last are another chunk's, or of
  // another piece.
  void prefetch_in_place(Place place) {
    if (!advance(&place)) place = {rows_.end, 0};
    const int64_t rows = plan_.rows_of(place.rb);
    if (rows > 0) background_.prefetches.add({rows_in_place_at(place.rb, place.kb), 64, in_place_.step, rows});
  }

  // What the epilogue reads and writes: of this block or, where vector blocks go through all of k at once, which may be
  // short, of the one after it. Rows of the output are some lines each, far apart, that the hardware does not foresee (fp32
  // on Zen 5: 784 x 512 x 128 with a residual 1.1 times as fast by it, 3136 x 256 x 64 1.3).
  void prefetch_epilogue(int64_t rb, int64_t panel, int64_t k_tiles) {
    if (!Block::kBackground && plan_.k_blocks == 1 && ++panel == panels_.end) {
      panel = panels_.begin;
      if (++rb == rows_.end) return;
    }
    const Epilogue& e = call_.epilogue;
    const int64_t column = panel * (w_.gated ? kTileColumns : kPanelColumns);
    const int64_t row = plan_.first_row(rb), rows = plan_.rows_of(rb);
    background_.prefetches.add_other(e, row, rows, column, k_tiles);
    if (!Block::kBackground && fetches_output_) {
      background_.prefetches.add_output(e, row - out_row_offset_, rows, column, k_tiles);
    }
  }

  // Hands the finished sums of a row block, of these panels, to the epilogue.
  void finish_sums(int64_t rb, Range panels) {
    EpilogueStrip done = strips_.next(call_.epilogue, w_, panels, sums(rb, panels.begin));
    done.row_sums = row_sums_ + (rb - rows_.begin) * Block::kRows;
    done.a_offset = Block::kOffset;
    background_.defer_epilogue(&call_, done, plan_.rows_of(rb), pass_k_blocks_ * plan_.k_block_tiles,
                               {plan_.first_row(rb)});
    if constexpr (!Block::kBackground) background_.finish_epilogue();
    if (by_panels()) turn_ ^= 1;
  }

  // The weights wanted after these, each row block its share: the panel's next k block and after the last the next
  // chunk's first, or, where a row block goes through all k blocks of a chunk, the same k block of the next chunk.
  void prefetch_weights(Place place, int64_t panel, BlockCall* block) {
    const int64_t slice = block->k_tiles * 2 * kTileBytes;
    if (Block::kBackground && plan_.keeps_weights && rows_.size() > 1) return prefetch_next_panel(place, panel, block);
    const bool one_block = rows_.size() == 1 && panels_.size() == 1;
    const bool k_by_k = pass_k_blocks_ < plan_.k_blocks || one_block;
    int64_t next_panel = panel, kb = place.kb;
    if (k_by_k) kb = kb + 1 < plan_.k_blocks ? kb + 1 : 0;
    if (!k_by_k || kb == 0) next_panel += panels_.size();
    if (next_panel >= weights_end_) return;
    const uint8_t* from = weights(next_panel, kb);
    const int64_t lines = weight_lines_;
    const int64_t offset = (place.rb - rows_.begin) * lines * 64 * block->k_tiles;
    if (offset >= slice) return;
    if constexpr (Block::kBackground) {
      block->ahead = from + offset;
      block->ahead_lines = lines;
    } else {
      background_.prefetches.add({from + offset, lines * 64, 64, lines});
    }
  }

  // Whether no piece of the part has brought these weights before, or fetched them ahead.
  bool begins_weights(Range rows, Range panels) const {
    const bool first_rows = begins_share(plan_.row_blocks, plan_.grid_rows, rows.begin);
    return (first_rows || !weights_stay_) && begins_share(w_.panels, plan_.grid_panels, panels.begin);
  }

  // For the first row block, some tiles before it multiplies them.
  void prefetch_far_weights(const BlockCall& block) {
    constexpr int64_t kStep = 2 * kTileBytes, kStepsAhead = 4;
    background_.prefetches.add({block.b + kStepsAhead * kStep, kStep, 64, kStep / 64});
  }

  // Where a chunk's weights stay: what its first row block reads next.
  void prefetch_next_panel(Place place, int64_t panel, BlockCall* block) const {
    const bool all_panels = panels_.size() == part_.size() && plan_.k_blocks == 1;
    if (place.rb != (all_panels ? first_row_block_ : rows_.begin)) return;
    if (panel + 1 == panels_.end && place.kb + 1 < plan_.k_blocks) {
      block->ahead = weights(panels_.begin, place.kb + 1);
    } else if (panel + 1 < weights_end_) {
      block->ahead = weights(panel + 1, panel + 1 == panels_.end ? 0 : place.kb);
    } else {
      return;
    }
    block->ahead_lines = 2 * kTileBytes / 64;
  }

  // Rows of the block after the one whose copy is under way, a share for each panel; a k step of them is a line or two.
  void prefetch_a(Place place, int64_t panel) {
    if (!advance(&place) || (Block::kBackground && !advance(&place))) return;
    const Range rows = share(plan_.rows_of(place.rb), panels_.size(), panel - panels_.begin);
    if (rows.size() == 0) return;
    const Prefetch prefetch =
        view_.prefetch(plan_.first_row(place.rb) + rows.begin, place.kb * plan_.k_block_tiles * Block::kTileK,
                       rows.size(), Block::kTileK);
    if (prefetch.count > 0) background_.prefetches.add(prefetch);
  }

  const GemmCall& call_;
  const PackedWeight& w_;
  const GemmPlan<Block>& plan_;
  View view_;
  Background<typename CopierOf<Block, View>::Type> background_;

  const EvenRows in_place_ = rows_in_place(call_, view_, plan_);
  int64_t placed_ = -1, a_rows_[kMostPointers];  // of views that say where rows are: the row block, its rows
  uint8_t* a_ = nullptr;    // copies [k block][row block of the chunk][kCopyBytes], unless they are in turns
  uint8_t* acc_ = nullptr;  // strips of sums, each [panel of the chunk][kAccBytes]
  KeptSums kept_;
  int32_t* row_sums_ = nullptr;
  int64_t strip_bytes_ = 0, turn_ = 0;
  Strips<Block> strips_;
  EpilogueStrip columns_{};  // of the chunk, where blocks finish their sums
  const int64_t out_row_offset_;
  const bool finishes_;         // sums become output in the block's registers
  const bool finishes_panels_;  // or a panel at a time, by themselves
  Output panel_output_;
  bool fetches_output_ = false;
  int64_t weight_lines_ = 0;  // to fetch for each step along k: a row block's share of the two tiles
  int64_t first_row_block_ = 0, pass_k_blocks_ = 1;
  Range part_{};  // all panels
  int64_t weights_end_ = 0;
  Range rows_{}, panels_{};  // the chunk
  bool weights_stay_ = false, keep_copies_ = true, weights_are_far_ = false;
  bool copied_ = false;  // the chunk's copy of A is complete
  int64_t copies_ = 1;   // of blocks of A: all, or one or two in turns
};

}  // namespace xopt::XOPT_ISA
