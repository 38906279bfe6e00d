// How a call is cut up: block sizes, k blocks, and the threads' grid. Pure arithmetic.
#pragma once

#include <type_traits>

#include "kernels/epilogue.h"
#include "kernels/row_blocks.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "tiles/block.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

XOPT_INLINE Range share(int64_t total, int64_t parts, int64_t part) {
  return {total * part / parts, total * (part + 1) / parts};
}

// Whether one of these parts begins there.
XOPT_INLINE bool begins_share(int64_t total, int64_t parts, int64_t place) {
  return share(total, parts, ceil_div(place * parts, total)).begin == place;
}

// Of `count`, equal parts of at most so many; 1 at least.
XOPT_INLINE int64_t even_share(int64_t count, int64_t most) {
  return maximum<int64_t>(1, ceil_div(count, maximum<int64_t>(1, ceil_div(count, most))));
}

inline constexpr int64_t kSetsOfL1 = 64;  // of 32 KB with 8 ways, of 48 KB with 12

// Of all sets of L1, the most lines that meet in one, of rows of so many bytes that begin `step` bytes apart.
inline int64_t most_lines_of_a_set(int64_t rows, int64_t bytes, int64_t step) {
  constexpr int64_t kSets = kSetsOfL1;
  const int64_t lines = minimum(ceil_div(bytes, 64), kSets);
  int8_t more[2 * kSets + 1] = {};  // lines in this set than in the one before; the second half goes on in the first
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * step / 64 % kSets;
    ++more[first];
    --more[first + lines];
  }
  int64_t held[kSets] = {}, now = 0, most = 0;
  for (int64_t set = 0; set < 2 * kSets; ++set) {
    now += more[set];
    held[set % kSets] += now;
    most = maximum(most, held[set % kSets]);
  }
  return most;
}

// Panels for which a copy of rows that meet in few sets of L1 pays (tiles: 1024 x 4096 x 1024 is 1.1 times as fast with one,
// 1024 x 768 x 3072, which has 24, 0.86).
inline constexpr int64_t kPanelsWorthACopy = 32;

// Lines of a set of L1 that weights leave to rows.
inline int64_t ways_of_rows() {
  constexpr int64_t kWaysOfWeights = 2;
  return l1d_ways() - kWaysOfWeights;
}

// Whether so many bytes of rows, which begin `step` bytes apart, stay in L1 beside weights. A row has fewer than all sets
// hold together.
inline bool stay_in_l1(int64_t rows, int64_t bytes, int64_t step) {
  // Fewer rows than ways never fill a set.
  return rows <= ways_of_rows() || most_lines_of_a_set(rows, bytes, step) <= ways_of_rows();
}

// Bytes from row to row of an A whose values a vector block multiplies as they are: floats that are not rounded first, or
// pairs of bf16. 0: it has to copy them.
template <class Block>
int64_t step_of_rows(const GemmCall& call) {
  if constexpr (Block::kFinishes) {
    const bool as_is = std::is_same_v<typename Block::A, Bf16>
                           ? call.a.dtype == DType::bf16 && call.weight.k % 2 == 0
                           : std::is_same_v<typename Block::Round, float> && call.a.dtype == DType::f32;
    if (as_is && call.a.data != nullptr) return Merged(call.a).even_rows(call.m).step;
  }
  return 0;
}

// The rows of A that tiles can be read from where they are, unless a copy pays; else a step of 0.
template <class Block>
EvenRows tiles_in_place(const Merged& view, const PackedWeight& w, int64_t m) {
  const bool as_is = Block::kIsInt ? w.zero_point == nullptr : view.dtype() == DType::bf16;
  if (!as_is || w.k == 0 || w.k % Block::kTileK != 0) return {};
  const EvenRows rows = view.even_rows(m);
  // Tile rows that lie across two cache lines take twice the loads.
  const bool at_lines = (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.step)) % 64 == 0;
  return at_lines ? rows : EvenRows{};
}

template <class Block>
struct GemmPlan : RowBlocks {
  // Panels of a chunk. More would spare loading the copy of A into L1 again, but the first chunk's weights come in
  // unfetched, and its sums have to fit in L1 beside A where a row block is finished in one pass. Vector blocks make a
  // copy for each chunk, so theirs are larger.
  static constexpr int64_t kOnePassPanels = Block::kBackground ? 4 : 8;
  static_assert(kOnePassPanels <= kMostStripPanels);
  // Sums of so few products are finished panel by panel: the epilogue of several panels goes row by row, and what it
  // looks up for each row and panel is a tenth of the products (3136 x 64 x 64: 362 to 326 us, fp32).
  static constexpr int64_t kShortSums = 128;
  // Row blocks that make up for the first one's wait for a chunk's weights; and so many that copies of A, and sums that
  // wait for the next k block, do not become too many.
  static constexpr int64_t kManyRowBlocks = 12, kMostKeptRowBlocks = 32;
  // How rows of A come: as call.a says, or from a view that says where they are.
  enum class Rows : uint8_t { of_call, in_place_of_view };

  explicit GemmPlan(const GemmCall& call, Rows rows = Rows::of_call)
      : GemmPlan(call, RowBlocks(call.m, most_rows(call), Block::kEvenRows), rows) {}
  GemmPlan(const GemmCall& call, const RowBlocks& blocks, Rows rows) : RowBlocks(blocks) {
    const PackedWeight& w = call.weight;
    // Equal ones: a short last one would pay for loading and storing the partial sums like a whole one.
    k_block_tiles = even_share(w.k_tiles, most_k_block_tiles(w.k_tiles));
    // Two tiles of floats stay together, where narrow groups of a convolution have a position of the kernel.
    const bool are_floats = Block::kFinishes && Block::kTileK == kTileRows;
    if (are_floats && k_block_tiles < w.k_tiles) k_block_tiles = round_up(k_block_tiles, 2);
    k_blocks = maximum<int64_t>(1, ceil_div(w.k_tiles, k_block_tiles));
    const int64_t step = step_of_rows<Block>(call);
    reads_in_place = rows == Rows::in_place_of_view || (step != 0 && stay_in_l1(block_rows, row_bytes(), step));
    if (step != 0 && reads_in_place && goes_in_one(w, step)) {
      k_block_tiles = w.k_tiles;
      k_blocks = 1;
    }
    choose_chunks(w.panel_bytes);
    panel_by_panel = !Block::kBackground && w.k_tiles * Block::kTileK <= kShortSums && call.tuning.chunk_panels == 0;
    max_threads = xopt::max_threads();
    choose_grid(w.panels);
    apply(call.tuning, w.panels);
  }

  int64_t tiles_of(int64_t k_block, int64_t k_tiles) const {
    return minimum(k_block_tiles, k_tiles - k_block * k_block_tiles);
  }

  // Whether L2 holds all weights beside what passes.
  bool weights_stay(const PackedWeight& w) const {
    return w.panels * w.panel_bytes <= (Block::kBackground ? kept_bytes() : most_resident);
  }

  // Of a row's values in so many tiles.
  static int64_t bytes_of_rows(int64_t k_tiles) { return k_tiles * (kTileBytes / kTileRows); }

  // Whether lines of a tile's rows, so many bytes apart, all meet in one set of L1 or two.
  static bool tile_rows_meet(int64_t step) { return step % kMeetingBytes == 0; }

  int64_t k_block_tiles, k_blocks;
  bool reads_in_place;  // vector blocks: rows of A are read where they are, and stay in L1 while panels pass
  int64_t chunk_blocks, chunk_panels;  // of a chunk: row blocks, panels
  int64_t most_resident;               // bytes of weights that stay in L2 beside all else
  int64_t pass_k_blocks;               // k blocks that a row block goes through before the next has its turn
  bool panel_by_panel;                 // where weights stay in L2
  bool keeps_weights = false;  // tiles: a chunk's weights stay in L2, rows of A stream; else the other way round
  int64_t max_threads, grid_rows = 1, grid_panels = 1;

 private:
  // Rows that meet in few sets of L1 are copied or, where few panels would share a copy, read where they are by blocks of
  // as few rows as a set holds (fp32 on Zen 5: 196 x 256 x 1024 1.06 times as fast, 1024 x 4096 x 1024 0.98; on Granite
  // Rapids 1024 x 256 x 1024 1.01, 1024 x 768 x 3072 0.95).
  static int64_t most_rows(const GemmCall& call) {
    constexpr int64_t kEnoughRows = 10, kFewPanels = 20;
    const int64_t step = step_of_rows<Block>(call), few = ways_of_rows();
    if (step == 0 || call.m <= Block::kRows || call.weight.panels >= kFewPanels) return Block::kRows;
    const int64_t bytes = bytes_of_rows(even_share(call.weight.k_tiles, Block::kMaxTiles));
    const bool meet = few >= kEnoughRows && few < Block::kRows && !stay_in_l1(Block::kRows, bytes, step);
    return meet ? few : Block::kRows;
  }

  // One k block where it can be: sums that wait for the next one are written and read again. But of long ones L2 holds few
  // panels, and where many rows pass more panels are worth more (2048 x 4096 x 4096 on AMX: 1.07 times as fast). Sums are
  // added up in the order of k blocks, so it must not depend on the number of threads.
  int64_t most_k_block_tiles(int64_t k_tiles) const {
    constexpr int64_t kLong = 96, kMany = 32;
    return Block::kBackground && k_tiles > kLong && row_blocks >= kMany ? minimum<int64_t>(64, Block::kMaxTiles)
                                                                        : Block::kMaxTiles;
  }

  // Rows in place of which L1 holds more than a k block beside weights: what a block looks up and fetches is then done once
  // (fp32 on AVX2, 128 x 768 x 768: 1.02 times as fast). Chains of sums are shorter than either.
  bool goes_in_one(const PackedWeight& w, int64_t step) const {
    constexpr int64_t kMostBytes = 24 << 10;
    const int64_t bytes = bytes_of_rows(w.k_tiles);
    return w.panel_bytes <= l2_bytes() / 4 && block_rows * bytes <= kMostBytes && stay_in_l1(block_rows, bytes, step);
  }

  void choose_chunks(int64_t panel_bytes) {
    const int64_t l2 = l2_bytes();
    most_resident = l2 / 2;
    if constexpr (Block::kBackground) {
      choose_long_chunks(l2);
    } else {
      choose_short_chunks(l2, panel_bytes);
    }
  }

  // Of L2, a half for a chunk's weights, three eighths for the copy of A and the sums of its rows. Rows that nobody copies
  // pass through it as well, and so do the next chunk's weights: then a quarter.
  void choose_short_chunks(int64_t l2, int64_t panel_bytes) {
    constexpr int64_t kFewKBlocks = 3;
    const int64_t for_weights = reads_in_place ? l2 / 4 : l2 / 2;
    if (panel_bytes * kOnePassPanels <= l2 / 2) {
      // All of K fits: a row block is finished before the next begins, and its sums never leave L1.
      chunk_panels = kOnePassPanels;
      pass_k_blocks = k_blocks;
    } else if (reads_in_place && k_blocks <= kFewKBlocks && panel_bytes <= for_weights) {
      // Nor do those of a few panels, for which rows that nobody copies may come in again and again. Beside their weights,
      // the next ones' and the rows L2 would have no room for sums that wait (197 x 768 x 768 on Zen 5: 1.06). A k block
      // of longer sums is of so many panels more that rows come seldom (fp32, 128 x 2048 x 5632 on Emerald Rapids: 1.1,
      // 197 x 768 x 3072 1.05; on Zen 3, whose L2 is not filled by two panels then, 128 x 2048 x 2048 1.1).
      chunk_panels = for_weights / panel_bytes;
      pass_k_blocks = k_blocks;
    } else {
      chunk_panels = minimum(kMostStripPanels, maximum<int64_t>(1, for_weights / panel_slice_bytes()));
      pass_k_blocks = 1;
    }
    const int64_t sum_bytes = Block::kRows * kPanelColumns * 4 * chunk_panels;
    chunk_blocks = maximum<int64_t>(1, l2 * 3 / 8 / (kCopyBytes<Block> + sum_bytes));
  }

  // k blocks so long that there is one of most products. Of L2 half for the copy of A, an eighth for a chunk's weights
  // and another for the next chunk's.
  void choose_long_chunks(int64_t l2) {
    chunk_panels = minimum(kOnePassPanels, maximum<int64_t>(1, l2 / 8 / panel_slice_bytes()));
    pass_k_blocks = 1;
    const int64_t sum_bytes = k_blocks > 1 ? Block::kRows * kPanelColumns * 4 * chunk_panels : 0;
    chunk_blocks = maximum<int64_t>(1, l2 / 2 / (row_block_bytes() + sum_bytes));
  }
  // What passes, and the next chunk's weights, want the rest (1576 x 768 x 3072 1.08 times as fast as with 9/16).
  static int64_t kept_bytes() { return l2_bytes() / 2; }
  int64_t most_kept_panels() const { return maximum<int64_t>(1, kept_bytes() / panel_slice_bytes()); }
  // Of a k block: a panel's weights, and a row block's values in whole tiles.
  int64_t panel_slice_bytes() const { return k_block_tiles * 2 * kTileBytes; }
  int64_t row_block_bytes() const { return Block::kRows * row_bytes(); }
  int64_t row_bytes() const { return bytes_of_rows(k_block_tiles); }

  // Tiles, where many row blocks pass: as many panels in a chunk as L2 holds beside the rows that stream through. A row of
  // the output is then written in long pieces, and rows of A in L1 serve the next panel more often (block_amx.h): 1024 x
  // 3072 x 768 1.15 times as fast, 1024 x 2048 x 5632 1.9 times. So is it where all of a thread's panels fit anyway.
  void keep_weights(int64_t panels, int64_t row_blocks_of_part) {
    const int64_t most = most_kept_panels();
    if (panels <= most && k_blocks == 1) {
      // Of a chunk's row blocks the first is copied before its products, and not between those of another.
      if (panels > chunk_panels) chunk_blocks = maximum<int64_t>(4, l2_bytes() / 8 / row_block_bytes());
      chunk_panels = panels;
    } else if (row_blocks_of_part >= kManyRowBlocks) {
      chunk_panels = even_share(panels, most);
      chunk_blocks = kMostKeptRowBlocks;
    } else {
      return;
    }
    keeps_weights = true;
  }

  // Where each thread has rows enough to make up for reading all weights, rows are split whatever the panels are: then all
  // products of a model agree, and each finds its rows where its own core has left them, as attention does its sequences
  // (csrc/README.md). Else by a rough count of cycles: a block step costs about 80, copying A's share of it 50, bringing in
  // a step's weights 100.
  void choose_grid(int64_t panels) {
    constexpr int64_t kEnoughRows = 256;
    const int64_t most = minimum(max_threads, row_blocks), enough = row_blocks * block_rows / kEnoughRows;
    int64_t best_cost = INT64_MAX;
    for (int64_t rows = maximum<int64_t>(1, minimum(most, enough)); rows <= most; ++rows) {
      const int64_t columns = minimum(max_threads / rows, panels);
      const int64_t r = ceil_div(row_blocks, rows), p = ceil_div(panels, columns);
      const int64_t cost = r * p * 80 + r * 50 + p * 100;
      if (cost < best_cost) {
        best_cost = cost;
        grid_rows = rows;
        grid_panels = columns;
      }
    }
  }

  void apply(const Tuning& tuning, int64_t panels) {
    if (tuning.grid_rows > 0) {
      grid_rows = minimum(minimum<int64_t>(tuning.grid_rows, max_threads), row_blocks);
      grid_panels = minimum(max_threads / grid_rows, panels);
    }
    if (tuning.chunk_panels > 0) {
      chunk_panels = minimum<int64_t>(tuning.chunk_panels, kMostStripPanels);
    } else if (Block::kBackground) {
      keep_weights(ceil_div(panels, grid_panels), ceil_div(row_blocks, grid_rows));
    }
    if (tuning.chunk_rows == TunedRows::half) chunk_blocks = maximum<int64_t>(1, chunk_blocks / 2);
    if (tuning.chunk_rows == TunedRows::twice) chunk_blocks *= 2;
    if (tuning.weights_stay != TunedStay::automatic) {
      most_resident = tuning.weights_stay == TunedStay::always ? INT64_MAX : 0;
    }
  }
};

}  // namespace xopt::XOPT_ISA
