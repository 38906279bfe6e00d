// Attention by blocks: who computes what, in which order.
//
// The rows of a head of keys are its queries, of all the heads of its group: row = query * group + head of the group.
//
//   item              a head of keys x a range of row blocks, whichever thread takes it
//    block of keys     384 of them unless tuned, packed into panels in L2 (keys: by column, values: by row)
//     row block         scores = block product; online softmax; sums = sums * factor + probabilities * values
//
// Of tiles attention_tiles.h tells.
// Row blocks and blocks of keys are cut the same way for any number of threads, so results do not depend on it. Blocks
// of keys that no query of a row block may see are passed over. A few rows (decoding) would not pay for the packing:
// attention_stream.h reads keys and values once, where they are.
#pragma once

#include <type_traits>

#include "kernels/attention_items.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_product.h"
#include "kernels/attention_stream.h"
#include "runtime/arena.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {

template <class Block>
struct AttentionPlan : AttentionItems {
  static constexpr int64_t kMostTerms = Block::kMaxTiles * Block::kTileK;
  static constexpr int64_t kMostKeysOfBlock = kMostKeys < kMostTerms ? kMostKeys : kMostTerms;
  static_assert(kKeyBlock <= kMostKeysOfBlock);

  explicit AttentionPlan(const AttentionCall& call) : AttentionItems(call, Block::kRows, Block::kEvenRows) {
    depth_tiles = ceil_div(call.depth, Block::kTileK);
    depth_blocks = maximum<int64_t>(1, ceil_div(depth_tiles, Block::kMaxTiles));
    key_panel_bytes = depth_tiles * 2 * kTileBytes;
    value_panels = ceil_div(call.value_depth, kPanelColumns);
    if (call.tuning.chunk_panels > 0) key_block = minimum(call.tuning.chunk_panels * kPanelColumns, kMostKeysOfBlock);
    value_panel_bytes = key_block / Block::kTileK * 2 * kTileBytes;
  }

  int64_t key_block = kKeyBlock, value_panel_bytes;
  int64_t depth_tiles, depth_blocks;  // of the depth: tiles, and blocks of at most kMaxTiles
  int64_t key_panel_bytes, value_panels;
};

template <class Block, class T>
class AttentionThread {
  using A = typename Block::A;
  using State = BlockState<round_up(Block::kRows, kWidth)>;
  static constexpr int64_t kAccValues = Block::kRows * kPanelColumns;
  using Softmax = SoftmaxStep<round_up(Block::kRows, kWidth), A>;
  static constexpr bool kByWords = XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16 && std::is_same_v<A, Bf16>;
  static constexpr int kHalvesAtOnce = kWidth == kTileColumns ? 2 : 1;  // of a panel, as registers allow

 public:
  AttentionThread(const AttentionCall& call, const AttentionPlan<Block>& plan, DType dtype)
      : call_(call), plan_(plan), dtype_(dtype), mask_(call.mask) {}

  void compute(int64_t item) {
    const AttentionHead<T> head = plan_.template head_of<T>(item);
    blocks_ = plan_.blocks_of(item);
    const int64_t count = blocks_.size(), key_block = plan_.key_block, key_panels = ceil_div(key_block, kPanelColumns);
    const Scratch keys(static_cast<size_t>(key_panels * plan_.key_panel_bytes));
    const Scratch values(static_cast<size_t>(plan_.value_panels * plan_.value_panel_bytes));
    const Scratch queries(static_cast<size_t>(plan_.depth_blocks * kCopyBytes<Block>));
    const Scratch probabilities(static_cast<size_t>(kCopyBytes<Block>));
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

    const KeyRange wanted = plan_.keys_of(blocks_);
    for (int64_t key = 0; key < wanted.end; key += key_block) {
      if (key + key_block <= wanted.begin) continue;
      pack(head.some_keys(key, key_block), head.some_values(key, key_block));
      upcoming_.find(plan_, item, key + key_block < wanted.end ? key + key_block : 0, key_block);
      for (int64_t block = blocks_.begin; block < blocks_.end; ++block) {
        const KeyRange seen = plan_.keys_of({block, block + 1});
        if (seen.begin >= seen.end || seen.begin >= key + key_block || seen.end <= key) continue;
        step(head, block, key, seen);
        if (seen.end <= key + key_block) finish(head, block);
      }
    }
    for (int64_t block = blocks_.begin; block < blocks_.end; ++block) {
      const KeyRange seen = plan_.keys_of({block, block + 1});
      if (seen.begin >= seen.end) finish(head, block);
    }
  }

 private:
  float* sums_of(int64_t block) const { return sums_ + (block - blocks_.begin) * plan_.value_panels * kAccValues; }
  State* state_of(int64_t block) const { return states_ + (block - blocks_.begin); }

  void pack(const HeadRows<T>& keys, const HeadRows<T>& values) {
    pack_keys<A>(keys, keys_);
    pack_values<A>(values, plan_.value_panel_bytes, values_);
    if constexpr (kByWords) keys_magnitude_ = largest_magnitude(keys);
  }

  void step(const AttentionHead<T>& head, int64_t block, int64_t key, KeyRange seen) {
    const int64_t count = minimum(plan_.key_block, seen.end - key), panels = ceil_div(count, kPanelColumns);
    // The first keys that a row block sees overwrite the sums.
    const bool more = seen.begin < key;
    const Range rows = plan_.rows_of_block(block);
    if (!more) prefetch_queries(head, block + 1);
    const Range share_of_rows = share(upcoming_.keys.count, blocks_.size(), block - blocks_.begin);
    prefetch_rows(upcoming_.keys, share_of_rows.begin, share_of_rows.end);
    find_places(call_, rows.begin, rows.size(), places_);
    copy_queries(head, rows.size());
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
        const int64_t tile = k * Block::kMaxTiles;
        const int64_t depth = minimum(Block::kMaxTiles * Block::kTileK, call_.depth - tile * Block::kTileK);
        const uint8_t* keys_panel = keys_ + panel * plan_.key_panel_bytes + tile * 2 * kTileBytes;
        const BlockCall call{queries_ + k * kCopyBytes<Block>, keys_panel, 0, scores_ + panel * kAccValues, k > 0};
        multiply(rows.size(), count - panel * kPanelColumns, depth, call);
      }
    }
    prefetch_rows(upcoming_.values, share_of_rows.begin, share_of_rows.end);
    const ScoreBlock scores{scores_, kPanelColumns, kAccValues, rows.size(), count};
    State* state = state_of(block);
    if constexpr (kByWords) {
      if (!more) state->magnitude = head.magnitude_of_queries(places_, rows.size());
    }
    const bool by_words = kByWords && reach_of_scores(call_, state->magnitude, keys_magnitude_) < kReachOfWords;
    Softmax softmax(call_, scores, state, probabilities_, Block::kStride, kPanelColumns, by_words);
    alignas(64) float factors[round_up(Block::kRows, kWidth)];
    head.mask(rows, places_, key, count, &mask_, &softmax);
    softmax.take_largest(factors);
    for (int64_t panel = 0; panel < panels; ++panel) softmax.exponentiate(panel, 0, rows.size());
    softmax.add_sums();
    if (more) ScoreBlock{sums_of(block), kPanelColumns, kAccValues, rows.size(), call_.value_depth}.scale_rows(factors);
    add_values(block, count, more);
  }

  // Probabilities times values into the sums.
  void add_values(int64_t block, int64_t count, bool more) const {
    const int64_t rows = plan_.rows_of_block(block).size();
    for (int64_t panel = 0; panel < plan_.value_panels; ++panel) {
      const BlockCall call{probabilities_, values_ + panel * plan_.value_panel_bytes, 0,
                           sums_of(block) + panel * kAccValues, more};
      multiply(rows, call_.value_depth - panel * kPanelColumns, count, call);
    }
  }

  void prefetch_queries(const AttentionHead<T>& head, int64_t block) {
    if (block >= blocks_.end) return;
    const Range rows = plan_.rows_of_block(block);
    find_places(call_, rows.begin, rows.size(), places_);
    for (int64_t row = 0; row < rows.size(); ++row) {
      prefetch_rows(HeadRows<T>{head.queries(places_[row]), 0, 1, call_.depth}, 0, 1);
    }
  }

  void copy_queries(const AttentionHead<T>& head, int64_t rows) const {
    for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
      const int64_t first = k * Block::kMaxTiles * Block::kTileK;
      const int64_t padded = minimum(Block::kMaxTiles, plan_.depth_tiles - k * Block::kMaxTiles) * Block::kTileK;
      A* to = reinterpret_cast<A*>(queries_ + k * kCopyBytes<Block>);
      for (int64_t row = 0; row < rows; ++row, to += Block::kStride) {
        const auto* from = reinterpret_cast<const uint8_t*>(head.queries(places_[row]) + first);
        const int64_t count = minimum(padded, call_.depth - first);
        copy_run<Block>(dtype_, from, count, to);
        __builtin_memset(to + count, 0, static_cast<size_t>(padded - count) * sizeof(A));
      }
    }
  }

  // `k`: how many values of it count. Where products are of fp32, no others are multiplied.
  static void multiply(int64_t rows, int64_t columns, int64_t k, BlockCall call) {
    struct Nothing {
      XOPT_INLINE void step() const {}
    } nothing;
    if constexpr (sizeof(A) == 4) {
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
      call.k_tiles = ceil_div(k, Block::kTileK);
      Block::run(rows, call, nothing);
    }
  }

  void finish(const AttentionHead<T>& head, int64_t block) {
    const Range rows = plan_.rows_of_block(block);
    find_places(call_, rows.begin, rows.size(), places_);
    const State& state = *state_of(block);
    for (int64_t row = 0; row < rows.size(); ++row) {
      const float inverse = head.inverse_of(places_[row], state.sum[row], state.largest[row]);
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
  UpcomingRows<T> upcoming_;
  uint8_t *keys_ = nullptr, *values_ = nullptr;  // panels of a block of keys
  uint8_t* queries_ = nullptr;                   // copies: [block of the depth]
  A* probabilities_ = nullptr;                   // in the place of a copy of A
  float *scores_ = nullptr, *sums_ = nullptr;    // [panel][row][32], [row block][panel][row][32]
  State* states_ = nullptr;                      // [row block]
  float keys_magnitude_ = 0;
};

// T: how the dtype lies in memory.
template <class Block, class T>
void attention_with(const AttentionCall& call, DType dtype) {
  if (few_rows_done<T>(call)) return;
  const AttentionPlan<Block> plan(call);
  for_each_item(plan.items, plan.threads, [&] {
    return [&, scope = typename Block::Scope(),
            thread = AttentionThread<Block, T>(call, plan, dtype)](int64_t item) mutable { thread.compute(item); };
  });
}

}  // namespace xopt::XOPT_ISA
