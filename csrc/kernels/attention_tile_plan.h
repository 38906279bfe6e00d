// How attention on tiles is cut up (attention_tiles.h). Pure arithmetic.
#pragma once

#include "kernels/attention_items.h"

namespace xopt::XOPT_ISA {

struct TilePlan : AttentionItems {
  static constexpr int64_t kRows = 2 * kTileRows;
  static constexpr int64_t kMostStepKeys = 128;
  static constexpr int64_t kChunkBytes = 512 * 1024;

  explicit TilePlan(const AttentionCall& call) : AttentionItems(call, kRows, false, item_rows(call)) {
    depth_tiles = maximum<int64_t>(1, ceil_div(call.depth, 2 * kTileRows));
    value_tiles = call.value_depth / kTileColumns + 1;
    value_panels = ceil_div(value_tiles, 2);
    key_panel_bytes = depth_tiles * 2 * kTileBytes;
    // Sums of wide values cost more to load and store than scores beyond L1.
    step_keys = value_tiles > 8 ? kMostStepKeys : kMostStepKeys / 2;
    choose_chunk();
    query_bytes = (depth_tiles | 1) * 64;
    query_step = call.query.row_stride * 2;
    reads_queries = call.group == 1 && call.depth % (2 * kTileRows) == 0 && query_step % 64 == 0 &&
                    stay_in_l1(kRows, depth_tiles * 64, query_step);
    // So many products of tiles go with a panel of scores.
    const int64_t products = 4 * depth_tiles + 2 * value_tiles;
    rows_at_once = products >= kRows ? 1 : products > kRows / 3 ? 2 : 4;
  }

  int64_t depth_tiles;  // steps of a product along the depth
  int64_t value_tiles, value_panels, key_panel_bytes, value_panel_bytes;
  int64_t step_keys, chunk_keys;
  bool has_chunks;       // more than one
  int64_t query_bytes;   // from a query's copy to the next, an odd number of cache lines
  int64_t query_step;    // bytes from a query to the next, of those that are multiplied as they are
  bool reads_queries;    // out of the queries themselves, with no copy
  int64_t rows_at_once;  // of a panel, 1, 2 or 4, whose exponentials are made after each instruction that multiplies

 private:
  // Of an item, which packs its keys and values: with 1024 rows to 4096 keys that took a sixth of the time (8 heads of depth
  // 40 or 160 on Granite Rapids: 2048 are 1.1 times as fast). Where keys are few, rows leave the caches between their
  // copies, products and outputs (8 x 1024 x 77 x 80: 512 are 1.2 times as fast as 1024). Threads that are not equally fast
  // want some items to share (two for each of eight threads on busy Emerald Rapids cores: medians 0.8 to 1.05, least times
  // 1.1 to 1.2).
  static int64_t item_rows(const AttentionCall& call) {
    constexpr int64_t kItemsOfThread = 4;
    const int64_t most = maximum<int64_t>(512, minimum<int64_t>(2 * call.keys, 2048));
    const int64_t items = call.batch * call.heads * ceil_div(call.queries * call.group, most);
    return items >= kItemsOfThread * xopt::max_threads() ? most : minimum(most, kMostRows);
  }

  void choose_chunk() {
    const int64_t bytes_of_step = step_keys / kPanelColumns * (key_panel_bytes + value_panels * 2 * kTileBytes);
    int64_t steps = maximum<int64_t>(1, kChunkBytes / bytes_of_step);
    if (call.tuning.chunk_panels > 0) steps = ceil_div(call.tuning.chunk_panels * kPanelColumns, step_keys);
    chunk_keys = minimum(steps * step_keys, round_up(maximum<int64_t>(1, call.keys), step_keys));
    value_panel_bytes = chunk_keys / kPanelColumns * 2 * kTileBytes;
    has_chunks = chunk_keys < call.keys;
  }
};

}  // namespace xopt::XOPT_ISA
