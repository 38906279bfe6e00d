// Attention by blocks: who computes what, in which order.
//
// The rows of a head of keys are its queries, of all the heads of its group: row = query * group + head of the group.
//
//   item              a head of keys x a range of row blocks, whichever thread takes it
//    block of keys     256 of them, packed into panels that stay in L2 (keys: by column, values: by row)
//     row block         scores = block product; online softmax; sums = sums * factor + probabilities * values
//
// Row blocks and blocks of keys are cut the same way for any number of threads, so results do not depend on it. Blocks
// of keys that no query of a row block may see are passed over. A few rows (decoding) would not pay for the packing:
// AttentionStream reads keys and values once, where they are.
#pragma once

#include "kernels/attention_pack.h"
#include "kernels/attention_softmax.h"
#include "kernels/gemm_plan.h"
#include "runtime/arena.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kFewRows = 8;

// Rows of queries in the order above, for copy_row.
class QueryRows {
 public:
  QueryRows(const AttentionCall& call, DType dtype, int64_t batch, int64_t head)
      : call_(call),
        dtype_(dtype),
        offset_(batch * call.query.batch_stride + head * call.group * call.query.head_stride) {}

  XOPT_INLINE Run run(int64_t row, int64_t k) const {
    const HeadsView& query = call_.query;
    const int64_t at = offset_ + row / call_.group * query.row_stride + row % call_.group * query.head_stride + k;
    return {static_cast<const uint8_t*>(query.data) + at * dtype_size(dtype_), call_.depth - k};
  }
  DType dtype() const { return dtype_; }

 private:
  const AttentionCall& call_;
  DType dtype_;
  int64_t offset_;
};

// A head of keys, and what both ways of computing it have in common.
template <class T>
struct AttentionHead {
  const AttentionCall& call;
  int64_t batch, head;

  const T* keys(int64_t key) const { return at(call.key, key); }
  const T* values(int64_t key) const { return at(call.value, key); }
  T* out(int64_t row) const {
    const int64_t query = row / call.group, query_head = head * call.group + row % call.group;
    return static_cast<T*>(call.out) +
           ((batch * call.queries + query) * call.heads * call.group + query_head) * call.value_depth;
  }

  // Columns of a block of keys that a row sees.
  KeyRange seen(int64_t row, int64_t key, int64_t count) const {
    const KeyRange keys = keys_of_queries(call, row / call.group, row / call.group);
    return {maximum<int64_t>(0, keys.begin - key), minimum(count, keys.end - key)};
  }
  const float* bias(MaskRow* mask, int64_t row, int64_t key, int64_t count) const {
    return mask->load(batch, head * call.group + row % call.group, row / call.group, key, count);
  }

 private:
  const T* at(const HeadsView& view, int64_t key) const {
    return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride +
           key * view.row_stride;
  }
};

// What a row's sums have to be multiplied by in the end; 0 for a row that saw nothing, whose sums do not count.
XOPT_INLINE float inverse_of(const SoftmaxState& state) { return state.sum == 0 ? 0.0F : 1.0F / state.sum; }

template <class T>
XOPT_INLINE void write_scaled(const float* sums, float inverse, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const F x = inverse == 0 ? set1(0.0F) : mul(load(sums + i), set1(inverse));
    store_first(out + i, x, count - i);
  }
}

// ---- Many rows: packed keys and values ------------------------------------------------------------------------------

template <class Block>
struct AttentionPlan {
  static constexpr int64_t kMostRows = 1024;  // of an item: their sums stay in L2 or near it
  static constexpr int64_t kLeastRows = 128;  // fewer would pack keys and values for too little

  explicit AttentionPlan(const AttentionCall& call) {
    rows = call.queries * call.group;
    block_rows = Block::kEvenRows ? ceil_div(rows, ceil_div(rows, Block::kRows)) : Block::kRows;
    row_blocks = ceil_div(rows, block_rows);
    depth_tiles = ceil_div(call.depth, Block::kTileK);
    depth_blocks = maximum<int64_t>(1, ceil_div(depth_tiles, Block::kMaxTiles));
    key_panel_bytes = depth_tiles * 2 * kTileBytes;
    value_panels = ceil_div(call.value_depth, kPanelColumns);
    threads = xopt::max_threads();
    parts = ceil_div(rows, kMostRows);
    const int64_t heads = call.batch * call.heads;
    if (heads % threads != 0 && heads < 4 * threads) {
      const int64_t balanced = minimum(ceil_div(4 * threads, heads), ceil_div(rows, kLeastRows));
      parts = maximum(parts, maximum(balanced, ceil_div(threads, heads)));
    }
    parts = minimum(parts, row_blocks);
    items = heads * parts;
  }

  int64_t rows, block_rows, row_blocks;
  int64_t depth_tiles, depth_blocks;  // of the depth: tiles, and blocks of at most kMaxTiles
  int64_t key_panel_bytes, value_panels;
  int64_t threads, parts, items;  // parts of a head's row blocks
};

template <class Block, class T>
class AttentionThread {
  using A = typename Block::A;
  static constexpr int64_t kAccValues = Block::kRows * kPanelColumns;
  static constexpr int64_t kBlockValues = Block::kRows * Block::kStride;  // of a copy of A
  static constexpr int64_t kKeyPanels = kKeyBlock / kPanelColumns;
  static constexpr int64_t kValuePanelBytes = kKeyBlock / Block::kTileK * 2 * kTileBytes;
  static_assert(kKeyBlock <= Block::kMaxTiles * Block::kTileK);

 public:
  AttentionThread(const AttentionCall& call, const AttentionPlan<Block>& plan, DType dtype)
      : call_(call), plan_(plan), dtype_(dtype), mask_(call.mask) {}

  void compute(int64_t item) {
    const int64_t index = item / plan_.parts;
    const AttentionHead<T> head{call_, index / call_.heads, index % call_.heads};
    blocks_ = share(plan_.row_blocks, plan_.parts, item % plan_.parts);
    const int64_t count = blocks_.size();
    const Scratch keys(static_cast<size_t>(kKeyPanels * plan_.key_panel_bytes));
    const Scratch values(static_cast<size_t>(plan_.value_panels * kValuePanelBytes));
    const Scratch a(static_cast<size_t>((plan_.depth_blocks + 1) * kBlockValues) * sizeof(A));
    const Scratch scores(static_cast<size_t>(kKeyPanels * kAccValues) * sizeof(float));
    const Scratch sums(static_cast<size_t>(count * plan_.value_panels * kAccValues) * sizeof(float));
    const Scratch states(static_cast<size_t>(count * Block::kRows) * sizeof(SoftmaxState));
    keys_ = keys.as<uint8_t>();
    values_ = values.as<uint8_t>();
    queries_ = a.as<A>();
    probabilities_ = queries_ + plan_.depth_blocks * kBlockValues;
    scores_ = scores.as<float>();
    sums_ = sums.as<float>();
    states_ = states.as<SoftmaxState>();
    for (int64_t i = 0; i < count * Block::kRows; ++i) states_[i] = {-kInfinity, 0.0F};

    const KeyRange wanted = keys_of(blocks_);
    for (int64_t key = 0; key < wanted.end; key += kKeyBlock) {
      if (key + kKeyBlock <= wanted.begin) continue;
      pack(head, key);
      for (int64_t block = blocks_.begin; block < blocks_.end; ++block) step(head, block, key);
    }
    for (int64_t block = blocks_.begin; block < blocks_.end; ++block) finish(head, block);
  }

 private:
  Range rows_of(int64_t block) const {
    return {block * plan_.block_rows, minimum((block + 1) * plan_.block_rows, plan_.rows)};
  }
  KeyRange keys_of(Range blocks) const {
    const int64_t last_row = rows_of(blocks.end - 1).end - 1;
    return keys_of_queries(call_, blocks.begin * plan_.block_rows / call_.group, last_row / call_.group);
  }
  float* sums_of(int64_t block) const { return sums_ + (block - blocks_.begin) * plan_.value_panels * kAccValues; }
  SoftmaxState* states_of(int64_t block) const { return states_ + (block - blocks_.begin) * Block::kRows; }

  void pack(const AttentionHead<T>& head, int64_t key) const {
    constexpr int64_t size = sizeof(T);
    const int64_t count = minimum(kKeyBlock, call_.keys - key);
    pack_keys(reinterpret_cast<const uint8_t*>(head.keys(key)), call_.key.row_stride * size, count, call_.depth * size,
              keys_);
    pack_values(reinterpret_cast<const uint8_t*>(head.values(key)), call_.value.row_stride * size, count,
                call_.value_depth, size, kValuePanelBytes, values_);
  }

  void step(const AttentionHead<T>& head, int64_t block, int64_t key) {
    const KeyRange keys = keys_of({block, block + 1});
    if (keys.begin >= key + kKeyBlock || keys.end <= key) return;
    const int64_t count = minimum(kKeyBlock, keys.end - key), panels = ceil_div(count, kPanelColumns);
    const Range rows = rows_of(block);
    copy_queries(head, rows);
    for (int64_t panel = 0; panel < panels; ++panel) {
      for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
        const int64_t tile = k * Block::kMaxTiles, tiles = minimum(Block::kMaxTiles, plan_.depth_tiles - tile);
        multiply(rows.size(),
                 {queries_ + k * kBlockValues, keys_ + panel * plan_.key_panel_bytes + tile * 2 * kTileBytes, tiles,
                  scores_ + panel * kAccValues, k > 0});
      }
    }
    float* sums = sums_of(block);
    // The first keys that a row block sees overwrite the sums. Rows without a key yet have the state -inf, 0.
    const bool more = keys.begin < key;
    softmax(head, block, key, count, panels, more);
    for (int64_t panel = 0; panel < plan_.value_panels; ++panel) {
      multiply(rows.size(), {probabilities_, values_ + panel * kValuePanelBytes, ceil_div(count, Block::kTileK),
                             sums + panel * kAccValues, more});
    }
  }

  void copy_queries(const AttentionHead<T>& head, Range rows) const {
    const QueryRows view(call_, dtype_, head.batch, head.head);
    for (int64_t k = 0; k < plan_.depth_blocks; ++k) {
      const int64_t first = k * Block::kMaxTiles * Block::kTileK;
      const int64_t padded = minimum(Block::kMaxTiles, plan_.depth_tiles - k * Block::kMaxTiles) * Block::kTileK;
      A* to = queries_ + k * kBlockValues;
      for (int64_t row = 0; row < rows.size(); ++row, to += Block::kStride) {
        copy_row<Block>(view, rows.begin + row, first, minimum(padded, call_.depth - first), padded, to);
      }
      clear_missing_rows(to, rows.size(), padded);
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

  // Scores into probabilities; sums made before are scaled to the new maximum.
  void softmax(const AttentionHead<T>& head, int64_t block, int64_t key, int64_t count, int64_t panels, bool more) {
    const Range rows = rows_of(block);
    for (int64_t row = 0; row < rows.size(); ++row) {
      const ScoreRow scores{scores_ + row * kPanelColumns, kAccValues, panels, head.seen(rows.begin + row, key, count),
                            head.bias(&mask_, rows.begin + row, key, count)};
      A* to = probabilities_ + row * Block::kStride;
      const float factor = softmax_step(scores, call_.scale, &states_of(block)[row], to);
      if (!more || factor == 1.0F) continue;
      for (int64_t panel = 0; panel < plan_.value_panels; ++panel) {
        float* sums = sums_of(block) + panel * kAccValues + row * kPanelColumns;
        for (int64_t i = 0; i < kPanelColumns; i += kWidth) store(sums + i, mul(load(sums + i), set1(factor)));
      }
    }
    clear_missing_rows(probabilities_ + rows.size() * Block::kStride, rows.size(), panels * kPanelColumns);
  }

  struct Barrier {
    // Tile loads do not say that they read memory.
    XOPT_INLINE void step() const {
      if constexpr (Block::kBackground) asm volatile("" ::: "memory");
    }
  };
  static void multiply(int64_t rows, const BlockCall& call) {
    Barrier barrier;
    barrier.step();
    Block::run(rows, call, barrier);
    barrier.step();
  }

  void finish(const AttentionHead<T>& head, int64_t block) const {
    const Range rows = rows_of(block);
    for (int64_t row = 0; row < rows.size(); ++row) {
      const float inverse = inverse_of(states_of(block)[row]);
      T* out = head.out(rows.begin + row);
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
  uint8_t *keys_ = nullptr, *values_ = nullptr;      // panels of a block of keys
  A *queries_ = nullptr, *probabilities_ = nullptr;  // copies of A: [block of the depth], and one
  float *scores_ = nullptr, *sums_ = nullptr;        // [panel][row][32], [row block][panel][row][32]
  SoftmaxState* states_ = nullptr;                   // [row block][row]
};

// Items of unequal length (causality) go to whichever thread is free: no item's result depends on another.
template <class Compute>
void for_each_item(int64_t items, int64_t threads, const Compute& make_compute) {
  int64_t next = 0;
  parallel(static_cast<int>(minimum(items, threads)), [&](int, int) {
    auto compute = make_compute();
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (item >= items) return;
      compute(item);
    }
  });
}

// ---- Few rows: one pass over keys and values, where they are --------------------------------------------------------

template <class T>
class AttentionStream {
 public:
  AttentionStream(const AttentionCall& call, DType dtype)
      : call_(call), dtype_(dtype), rows_(call.queries * call.group), mask_(call.mask) {}

  void compute(int64_t item) {
    const AttentionHead<T> head{call_, item / call_.heads, item % call_.heads};
    depth_ = round_up(call_.depth, kPanelColumns);
    value_depth_ = round_up(call_.value_depth, kPanelColumns);
    const Scratch queries(static_cast<size_t>(rows_ * depth_) * sizeof(float));
    const Scratch scores(static_cast<size_t>(rows_ * kKeyBlock) * sizeof(float));
    const Scratch sums(static_cast<size_t>(rows_ * value_depth_) * sizeof(float));
    queries_ = queries.as<float>();
    scores_ = scores.as<float>();
    sums_ = sums.as<float>();
    const QueryRows view(call_, dtype_, head.batch, head.head);
    for (int64_t row = 0; row < rows_; ++row) {
      if (call_.depth > 0) {
        convert_run<float>(reinterpret_cast<const T*>(view.run(row, 0).data), call_.depth, queries_ + row * depth_);
      }
      for (int64_t i = call_.depth; i < depth_; ++i) queries_[row * depth_ + i] = 0;
    }
    for (int64_t i = 0; i < rows_ * value_depth_; ++i) sums_[i] = 0;
    for (int64_t row = 0; row < rows_; ++row) states_[row] = {-kInfinity, 0.0F};

    const KeyRange keys = keys_of_queries(call_, 0, call_.queries - 1);
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
      step(head, key, minimum(kKeyBlock, keys.end - key));
    }
    for (int64_t row = 0; row < rows_; ++row) {
      write_scaled(sums_ + row * value_depth_, inverse_of(states_[row]), call_.value_depth, head.out(row));
    }
  }

 private:
  void step(const AttentionHead<T>& head, int64_t key, int64_t count) {
    const int64_t panels = ceil_div(count, kPanelColumns);
    for (int64_t i = 0; i < count; ++i) {
      const T* one = head.keys(key + i);
      for (int64_t row = 0; row < rows_; ++row) scores_[row * kKeyBlock + i] = dot(queries_ + row * depth_, one);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      float* scores = scores_ + row * kKeyBlock;
      for (int64_t i = count; i < panels * kPanelColumns; ++i) scores[i] = 0;
      const ScoreRow block{scores, kPanelColumns, panels, head.seen(row, key, count),
                           head.bias(&mask_, row, key, count)};
      const float factor = softmax_step(block, call_.scale, &states_[row], scores);
      add_values(head, key, count, scores, factor, sums_ + row * value_depth_);
    }
  }

  float dot(const float* query, const T* key) const {
    F sum = set1(0.0F);
    int64_t i = 0;
    for (; i + kWidth <= call_.depth; i += kWidth) sum = fma(load(query + i), load(key + i), sum);
    if (i < call_.depth) sum = fma(load(query + i), load_first(key + i, call_.depth - i), sum);
    return reduce_add(sum);
  }

  // Four vectors of columns at a time, which stay in registers over the keys.
  void add_values(const AttentionHead<T>& head, int64_t key, int64_t count, const float* probabilities, float factor,
                  float* sums) const {
    int64_t column = 0;
    for (; column + 4 * kWidth <= call_.value_depth; column += 4 * kWidth) {
      add_columns<4>(head, key, count, probabilities, factor, column, sums + column);
    }
    for (; column < call_.value_depth; column += kWidth) {
      add_columns<1>(head, key, count, probabilities, factor, column, sums + column);
    }
  }

  template <int N>
  void add_columns(const AttentionHead<T>& head, int64_t key, int64_t count, const float* probabilities, float factor,
                   int64_t column, float* sums) const {
    F total[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) total[v] = mul(load(sums + v * kWidth), set1(factor));
    const T* values = head.values(key) + column;
    const int64_t left = call_.value_depth - column;
    for (int64_t i = 0; i < count; ++i, values += call_.value.row_stride) {
      const F p = set1(probabilities[i]);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const F value = N == 1 ? load_first(values, left) : load(values + v * kWidth);
        total[v] = fma(p, value, total[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) store(sums + v * kWidth, total[v]);
  }

  const AttentionCall& call_;
  const DType dtype_;
  const int64_t rows_;
  MaskRow mask_;
  int64_t depth_ = 0, value_depth_ = 0;  // with the padding of the copies
  float *queries_ = nullptr, *scores_ = nullptr, *sums_ = nullptr;
  SoftmaxState states_[kFewRows];
};

// T: how the dtype lies in memory.
template <class Block, class T>
void attention_with(const AttentionCall& call, DType dtype) {
  const int64_t heads = call.batch * call.heads, rows = call.queries * call.group;
  if (heads == 0 || rows == 0 || call.value_depth == 0) return;
  if (rows <= kFewRows) {
    return for_each_item(heads, xopt::max_threads(), [&] {
      return [thread = AttentionStream<T>(call, dtype)](int64_t item) mutable { thread.compute(item); };
    });
  }
  const AttentionPlan<Block> plan(call);
  for_each_item(plan.items, plan.threads, [&] {
    return [&, scope = typename Block::Scope(),
            thread = AttentionThread<Block, T>(call, plan, dtype)](int64_t item) mutable { thread.compute(item); };
  });
}

}  // namespace xopt::XOPT_ISA
