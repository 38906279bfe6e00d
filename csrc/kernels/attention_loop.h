// Attention by blocks: who computes what, in which order.
//
// The rows of a head of keys are its queries, of all the heads of its group: row = query * group + head of the group.
//
//   item              a head of keys x a range of row blocks, whichever thread takes it
//    block of keys     256 or 384 of them unless tuned, packed into panels in L2 (keys: by column, values: by row)
//     row block         scores = block product; online softmax; sums = sums * factor + probabilities * values
//
// With tiles, softmax and products go on side by side (attention_background.h).
// Row blocks and blocks of keys are cut the same way for any number of threads, so results do not depend on it. Blocks
// of keys that no query of a row block may see are passed over. A few rows (decoding) would not pay for the packing:
// attention_stream.h reads keys and values once, where they are.
#pragma once

#include <type_traits>

#include "kernels/attention_background.h"
#include "kernels/attention_head.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_product.h"
#include "kernels/attention_stream.h"
#include "kernels/row_blocks.h"
#include "runtime/arena.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {

template <class Block>
struct AttentionPlan : RowBlocks {
  static constexpr int64_t kMostRows = 1024;  // of an item: their sums stay in L2 or near it
  static constexpr int64_t kLeastRows = 128;  // fewer would pack keys and values for too little
  static constexpr int64_t kMostTerms = Block::kMaxTiles * Block::kTileK;
  static constexpr int64_t kMostKeysOfBlock = kMostKeys < kMostTerms ? kMostKeys : kMostTerms;
  static_assert(kKeyBlock <= kMostKeysOfBlock);

  explicit AttentionPlan(const AttentionCall& call)
      : RowBlocks(call.queries * call.group, Block::kRows, Block::kEvenRows) {
    depth_tiles = ceil_div(call.depth, Block::kTileK);
    depth_blocks = maximum<int64_t>(1, ceil_div(depth_tiles, Block::kMaxTiles));
    key_panel_bytes = depth_tiles * 2 * kTileBytes;
    value_panels = ceil_div(call.value_depth, kPanelColumns);
    if (call.tuning.chunk_panels > 0) key_block = minimum(call.tuning.chunk_panels * kPanelColumns, kMostKeysOfBlock);
    value_panel_bytes = key_block / Block::kTileK * 2 * kTileBytes;
    threads = xopt::max_threads();
    parts = ceil_div(rows, kMostRows);
    const int64_t heads = call.batch * call.heads;
    if (heads % threads != 0 && heads < 4 * threads) {
      const int64_t balanced = minimum(ceil_div(4 * threads, heads), ceil_div(rows, kLeastRows));
      parts = maximum(parts, maximum(balanced, ceil_div(threads, heads)));
    }
    if (call.tuning.chunk_rows == TunedRows::half) parts *= 2;
    if (call.tuning.chunk_rows == TunedRows::twice) parts = ceil_div(parts, 2);
    parts = minimum(parts, row_blocks);
    items = heads * parts;
    query_bytes = (depth_tiles | 1) * 64;
    query_step = call.query.row_stride * static_cast<int64_t>(sizeof(typename Block::A));
    reads_queries = Block::kBackground && call.group == 1 && call.depth % Block::kTileK == 0 && query_step % 64 == 0 &&
                    stay_in_l1(Block::kRows, depth_tiles * 64, query_step);
  }

  int64_t key_block = kKeyBlock, value_panel_bytes;
  int64_t depth_tiles, depth_blocks;  // of the depth: tiles, and blocks of at most kMaxTiles
  int64_t key_panel_bytes, value_panels;
  int64_t threads, parts, items;  // parts of a head's row blocks
  int64_t query_bytes;            // tiles: from a query's copy to the next, an odd number of cache lines
  int64_t query_step;             // bytes from a query to the next, of those that a block multiplies as they are
  bool reads_queries;             // tiles: out of the queries themselves, with no copy
};

template <class Block, class T>
class AttentionThread {
  using A = typename Block::A;
  using State = SoftmaxState<round_up(Block::kRows, kWidth)>;
  static constexpr int64_t kAccValues = Block::kRows * kPanelColumns;
  static constexpr int64_t kBlockBytes = Block::kRows * Block::kStride * static_cast<int64_t>(sizeof(A));  // of a copy
  using Softmax = SoftmaxStep<round_up(Block::kRows, kWidth), A>;
  static constexpr int kHalvesAtOnce = kWidth == kTileColumns ? 2 : 1;  // of a panel, as registers allow

 public:
  AttentionThread(const AttentionCall& call, const AttentionPlan<Block>& plan, DType dtype)
      : call_(call), plan_(plan), dtype_(dtype), mask_(call.mask) {}

  void compute(int64_t item) {
    const int64_t index = item / plan_.parts;
    const AttentionHead<T> head{call_, index / call_.heads, index % call_.heads};
    blocks_ = share(plan_.row_blocks, plan_.parts, item % plan_.parts);
    const int64_t count = blocks_.size(), key_block = plan_.key_block, key_panels = ceil_div(key_block, kPanelColumns);
    const Scratch keys(static_cast<size_t>(key_panels * plan_.key_panel_bytes));
    const Scratch values(static_cast<size_t>(plan_.value_panels * plan_.value_panel_bytes));
    // Tiles are read at any distance of rows, so copies of an item's queries lie close together, and each is made once.
    const Scratch queries(static_cast<size_t>(Block::kBackground ? count * Block::kRows * plan_.query_bytes
                                                                 : plan_.depth_blocks * kBlockBytes));
    const Scratch probabilities(static_cast<size_t>(kBlockBytes));
    const Scratch scores(static_cast<size_t>(key_panels * kAccValues) * sizeof(float));
    const Scratch sums(static_cast<size_t>(count * plan_.value_panels * kAccValues) * sizeof(float));
    const Scratch states(static_cast<size_t>(count) * sizeof(State));
    keys_ = keys.as<uint8_t>();
    values_ = values.as<uint8_t>();
    queries_ = queries.as<uint8_t>();
    probabilities_ = probabilities.as<A>();
    scores_ = scores.as<float>();
    sums_ = sums.as<float>();
    states_ = states.as<State>();
    for (int64_t i = 0; i < count; ++i) states_[i].clear();

    const KeyRange wanted = keys_of(blocks_);
    for (int64_t key = 0; key < wanted.end; key += key_block) {
      if (key + key_block <= wanted.begin) continue;
      pack(keys_at(head, key), values_at(head, key));
      find_upcoming(key + key_block < wanted.end ? key + key_block : 0, item);
      for (int64_t block = blocks_.begin; block < blocks_.end; ++block) {
        const KeyRange seen = keys_of({block, block + 1});
        if (seen.begin >= seen.end || seen.begin >= key + key_block || seen.end <= key) continue;
        step(head, block, key, seen);
        if (seen.end <= key + key_block) finish(head, block);
      }
    }
    for (int64_t block = blocks_.begin; block < blocks_.end; ++block) {
      const KeyRange seen = keys_of({block, block + 1});
      if (seen.begin >= seen.end) finish(head, block);
    }
  }

 private:
  Range rows_of(int64_t block) const { return {plan_.first_row(block), plan_.first_row(block + 1)}; }
  KeyRange keys_of(Range blocks) const {
    const int64_t last_row = rows_of(blocks.end - 1).end - 1;
    return keys_of_queries(call_, plan_.first_row(blocks.begin) / call_.group, last_row / call_.group);
  }
  float* sums_of(int64_t block) const { return sums_ + (block - blocks_.begin) * plan_.value_panels * kAccValues; }
  State* state_of(int64_t block) const { return states_ + (block - blocks_.begin); }

  HeadRows<T> keys_at(const AttentionHead<T>& head, int64_t key) const {
    return {head.keys(key), call_.key.row_stride, minimum(plan_.key_block, call_.keys - key), call_.depth};
  }
  HeadRows<T> values_at(const AttentionHead<T>& head, int64_t key) const {
    return {head.values(key), call_.value.row_stride, minimum(plan_.key_block, call_.keys - key), call_.value_depth};
  }

  void pack(const HeadRows<T>& keys, const HeadRows<T>& values) const {
    pack_keys<A>(keys, keys_);
    pack_values<A>(values, plan_.value_panel_bytes, values_);
  }

  // The keys and values that will be packed next are fetched meanwhile: this head's, or those of the item that this
  // thread will most likely take.
  void find_upcoming(int64_t key, int64_t item) {
    const int64_t index = key > 0 ? item / plan_.parts : minimum(item + plan_.threads, plan_.items - 1) / plan_.parts;
    const AttentionHead<T> next{call_, index / call_.heads, index % call_.heads};
    upcoming_keys_ = keys_at(next, key);
    upcoming_values_ = values_at(next, key);
  }

  void step(const AttentionHead<T>& head, int64_t block, int64_t key, KeyRange seen) {
    const int64_t count = minimum(plan_.key_block, seen.end - key), panels = ceil_div(count, kPanelColumns);
    // The first keys that a row block sees overwrite the sums.
    const bool more = seen.begin < key;
    const Range rows = rows_of(block);
    if (!more) prefetch_queries(head, block + 1);
    const Range share_of_rows = share(upcoming_keys_.count, blocks_.size(), block - blocks_.begin);
    prefetch_rows(upcoming_keys_, share_of_rows.begin, share_of_rows.end);
    find_places(call_, rows.begin, rows.size(), places_);
    const Queries queries = queries_of(head, block, !more);
    const ScoreBlock scores{scores_, kPanelColumns, kAccValues, rows.size(), count};
    Softmax softmax(call_, scores, state_of(block), probabilities_, Block::kStride, round_up(count, Block::kTileK));
    // Tiles: scores that nothing masks are looked at while the next panel's are computed.
    const bool plain = Block::kBackground && softmax.scales_later() && sees_all(head, rows.size(), key, count);
    const int64_t rows_of_step = ceil_div(rows.size(), maximum<int64_t>(1, plan_.depth_tiles));
    LargestScores<Softmax> largest(&softmax, rows.size(), rows_of_step);
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
        const int64_t tile = k * Block::kMaxTiles;
        const int64_t depth = minimum(Block::kMaxTiles * Block::kTileK, call_.depth - tile * Block::kTileK);
        const uint8_t* keys_panel = keys_ + panel * plan_.key_panel_bytes + tile * 2 * kTileBytes;
        BlockCall call{queries.rows + k * queries.block_step, keys_panel, 0, scores_ + panel * kAccValues, k > 0};
        call.a_stride = queries.stride;
        call.columns = count - panel * kPanelColumns;
        multiply(rows.size(), call.columns, depth, call, &largest);
      }
      if (plain) largest.begin(panel);
    }
    prefetch_rows(upcoming_values_, share_of_rows.begin, share_of_rows.end);
    alignas(64) float factors[round_up(Block::kRows, kWidth)];
    if (plain) {
      largest.finish();
      softmax.take_largest(factors);
    } else {
      softmax.find_largest([&](int64_t row) { return head.seen(places_[row], key, count); },
                           [&](int64_t row) { return head.bias(&mask_, places_[row], key, count); }, factors);
    }
    if (more) scale_sums(block, factors);
    add_values(block, count, more, &softmax);
  }

  // Whether all rows see all keys of a block, whole vectors of them, and no mask has a say.
  bool sees_all(const AttentionHead<T>& head, int64_t rows, int64_t key, int64_t count) const {
    const KeyRange first = head.seen(places_[0], key, count), last = head.seen(places_[rows - 1], key, count);
    const bool all = maximum(first.begin, last.begin) <= 0 && minimum(first.end, last.end) >= count;
    return all && count % kWidth == 0 && call_.mask.kind == MaskKind::none;
  }

  // Scores into probabilities, these times values into the sums.
  void add_values(int64_t block, int64_t count, bool more, Softmax* softmax) {
    const int64_t rows = rows_of(block).size(), panels = ceil_div(count, kPanelColumns);
    clear_missing_rows(probabilities_ + rows * Block::kStride, rows, round_up(count, Block::kTileK));
    Probabilities<Softmax> rest(softmax, panels);
    rest.finish(Block::kBackground ? kPanelsAhead : panels);
    for (int64_t panel = 0; panel < plan_.value_panels; ++panel) {
      BlockCall call{probabilities_, values_ + panel * plan_.value_panel_bytes, 0, sums_of(block) + panel * kAccValues,
                     more};
      call.columns = call_.value_depth - panel * kPanelColumns;
      multiply(rows, call.columns, count, call, &rest);
    }
    softmax->add_sums();
  }

  void scale_sums(int64_t block, const float* factors) const {
    const int64_t rows = rows_of(block).size();
    const ScoreBlock sums{sums_of(block), kPanelColumns, kAccValues, rows, call_.value_depth};
    for (int64_t row = 0; row < rows; ++row) {
      if (factors[row] == 1.0F) continue;
      const F factor = set1(factors[row]);
      sums.for_vectors(row, [&](float* at, int64_t) { store(at, mul(load(at), factor)); });
    }
  }

  void prefetch_queries(const AttentionHead<T>& head, int64_t block) {
    if (block >= blocks_.end) return;
    const Range rows = rows_of(block);
    find_places(call_, rows.begin, rows.size(), places_);
    for (int64_t row = 0; row < rows.size(); ++row) {
      prefetch_rows(HeadRows<T>{head.queries(places_[row]), 0, 1, call_.depth}, 0, 1);
    }
  }

  // Where the row block's queries begin, if tiles can read them there: whole rows of tiles, which begin where lines of the
  // cache do. Else nullptr.
  const uint8_t* queries_in_place(const AttentionHead<T>& head, int64_t rows) const {
    const auto* first = reinterpret_cast<const uint8_t*>(head.queries(places_[0]));
    const bool aligned = reinterpret_cast<uintptr_t>(first) % 64 == 0;
    return plan_.reads_queries && aligned && rows % kTileRows == 0 ? first : nullptr;
  }

  // A row block's queries: blocks of the depth, `block_step` bytes apart, whose rows are `stride` apart (0: as in
  // copies of A).
  struct Queries {
    const uint8_t* rows;
    int64_t stride, block_step;
  };

  // `first`: of an item, that the row block's queries are asked for.
  Queries queries_of(const AttentionHead<T>& head, int64_t block, bool first) const {
    const int64_t rows = rows_of(block).size();
    if constexpr (Block::kBackground) {
      constexpr int64_t kBlockStep = Block::kMaxTiles * 64;
      if (const uint8_t* in_place = queries_in_place(head, rows)) return {in_place, plan_.query_step, kBlockStep};
      uint8_t* copies = queries_ + (block - blocks_.begin) * Block::kRows * plan_.query_bytes;
      if (first) keep_queries(head, rows, copies);
      return {copies, plan_.query_bytes, kBlockStep};
    } else {
      copy_queries(head, rows);
      return {queries_, 0, kBlockBytes};
    }
  }

  // Of tiles, for all blocks of keys.
  void keep_queries(const AttentionHead<T>& head, int64_t rows, uint8_t* to) const {
    static_assert(std::is_same_v<A, T>, "tiles of what queries are");
    const int64_t bytes = call_.depth * static_cast<int64_t>(sizeof(T)), padded = plan_.depth_tiles * 64;
    for (int64_t row = 0; row < rows; ++row, to += plan_.query_bytes) {
      if (padded > bytes) __builtin_memset(to + padded - 64, 0, 64);
      copy_bytes(head.queries(places_[row]), bytes, to);
    }
    for (int64_t row = rows; row < round_up(rows, kTileRows); ++row, to += plan_.query_bytes) {
      __builtin_memset(to, 0, static_cast<size_t>(padded));
    }
  }

  // Of other blocks, for one block of keys.
  void copy_queries(const AttentionHead<T>& head, int64_t rows) const {
    for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
      const int64_t first = k * Block::kMaxTiles * Block::kTileK;
      const int64_t padded = minimum(Block::kMaxTiles, plan_.depth_tiles - k * Block::kMaxTiles) * Block::kTileK;
      A* to = reinterpret_cast<A*>(queries_ + k * kBlockBytes);
      for (int64_t row = 0; row < rows; ++row, to += Block::kStride) {
        const auto* from = reinterpret_cast<const uint8_t*>(head.queries(places_[row]) + first);
        const int64_t count = minimum(padded, call_.depth - first);
        copy_run<Block>(dtype_, from, count, to);
        __builtin_memset(to + count, 0, static_cast<size_t>(padded - count) * sizeof(A));
      }
    }
  }

  // Tiles always have all their rows: the missing ones are zeros, not what a former call left.
  static void clear_missing_rows(A* to, int64_t rows, int64_t columns) {
    if constexpr (!Block::kEvenRows) {
      for (int64_t row = rows; row < round_up(rows, kTileRows); ++row, to += Block::kStride) {
        __builtin_memset(to, 0, static_cast<size_t>(columns) * sizeof(A));
      }
    }
  }

  struct Nothing {
    XOPT_INLINE void step() const {}
  };
  // `k`: how many values of it count. Where products are of fp32, no others are multiplied. Only between the products
  // of tiles there is time for something else.
  template <class Between>
  static void multiply(int64_t rows, int64_t columns, int64_t k, BlockCall call, Between* between) {
    [[maybe_unused]] Nothing nothing;
    call.k_tiles = ceil_div(k, Block::kTileK);
    if constexpr (Block::kBackground) {
      tile_barrier();
      Block::run(rows, call, *between);
      tile_barrier();
    } else if constexpr (sizeof(A) == 4) {
      call.k_tiles = k;
      if (kHalvesAtOnce == 2 && columns > kTileColumns) {
        return ExactProduct<Block, kHalvesAtOnce>::run(rows, call, nothing);
      }
      ExactProduct<Block, 1>::run(rows, call, nothing);
      if (columns <= kTileColumns) return;
      call.b += kTileBytes;
      call.acc = static_cast<float*>(call.acc) + kTileColumns;
      ExactProduct<Block, 1>::run(rows, call, nothing);
    } else {
      Block::run(rows, call, nothing);
    }
  }

  void finish(const AttentionHead<T>& head, int64_t block) {
    const Range rows = rows_of(block);
    find_places(call_, rows.begin, rows.size(), places_);
    for (int64_t row = 0; row < rows.size(); ++row) {
      const float inverse = inverse_of(state_of(block)->sum[row]);
      T* out = head.out(places_[row]);
      for (int64_t panel = 0; panel < plan_.value_panels; ++panel) {
        const int64_t column = panel * kPanelColumns;
        write_scaled(sums_of(block) + panel * kAccValues + row * kPanelColumns, inverse,
                     minimum(kPanelColumns, call_.value_depth - column), out + column);
      }
    }
  }

  const AttentionCall& call_;
  const AttentionPlan<Block>& plan_;
  const DType dtype_;
  MaskRow mask_;
  Range blocks_{};
  RowPlace places_[Block::kRows];  // of the row block at hand
  HeadRows<T> upcoming_keys_{}, upcoming_values_{};
  uint8_t *keys_ = nullptr, *values_ = nullptr;  // panels of a block of keys
  uint8_t* queries_ = nullptr;                   // copies: [row block], or of one: [block of the depth]
  A* probabilities_ = nullptr;                   // in the place of a copy of A
  float *scores_ = nullptr, *sums_ = nullptr;    // [panel][row][32], [row block][panel][row][32]
  State* states_ = nullptr;                      // [row block]
};

// T: how the dtype lies in memory.
template <class Block, class T>
void attention_with(const AttentionCall& call, DType dtype) {
  const int64_t heads = call.batch * call.heads, rows = call.queries * call.group;
  if (heads == 0 || rows == 0 || call.value_depth == 0) return;
  if (rows <= kFewRows) return AttentionStream<T>::run(call);
  const AttentionPlan<Block> plan(call);
  for_each_item(plan.items, plan.threads, [&] {
    return [&, scope = typename Block::Scope(),
            thread = AttentionThread<Block, T>(call, plan, dtype)](int64_t item) mutable { thread.compute(item); };
  });
}

}  // namespace xopt::XOPT_ISA
