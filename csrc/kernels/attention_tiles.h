// Attention on tiles: three steps are under way at a time. While the vector ports make probabilities of a step's scores,
// the matrix unit multiplies queries and keys of the next step, and probabilities and values of the one before.
//
//   item               a head of keys x a range of row blocks, whichever thread takes it
//    chunk of keys      packed into panels, which stay in L2 (keys: by column, values: by row)
//     row block          32 rows; their sums, queries and states stay in L1
//      step               64 or 128 keys: scores = queries * keys; softmax; sums += probabilities * values
//
// What is left of an online softmax: the largest of a row block's first scores is subtracted from all of them, unless
// others outgrow it by far. Sums of probabilities are one more column of values, which is ones: products are what there is
// time for.
#pragma once

#include "kernels/attention_exponentials.h"
#include "kernels/attention_head.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_tile_plan.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/tile_product.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// A row block's scores with some keys of a chunk.
struct TileStep {
  int64_t block, key, count;
  bool first, last;  // of the row block: overwrites its sums; completes them
};

class TileAttention {
  using State = BlockState<TilePlan::kRows>;
  using Softmax = SoftmaxStep<TilePlan::kRows, Bf16, false>;
  static constexpr int64_t kRows = TilePlan::kRows, kMostStepKeys = TilePlan::kMostStepKeys;
  static constexpr int64_t kSumValues = kRows * kPanelColumns;  // of a panel
  static constexpr int64_t kStepPanels = kMostStepKeys / kPanelColumns;

 public:
  TileAttention(const AttentionCall& call, const TilePlan& plan) : call_(call), plan_(plan), mask_(call.mask) {}

  void compute(int64_t item) {
    const auto head = plan_.head_of<Bf16>(item);
    head_ = &head;
    blocks_ = plan_.blocks_of(item);
    const int64_t count = blocks_.size();
    const Scratch keys(static_cast<size_t>(plan_.chunk_keys / kPanelColumns * plan_.key_panel_bytes));
    const Scratch values(static_cast<size_t>(plan_.value_panels * plan_.value_panel_bytes));
    const Scratch queries(static_cast<size_t>(count * kRows * plan_.query_bytes));
    const Scratch probabilities(2 * kStepPanels * kSumValues * sizeof(Bf16));
    const Scratch scores(2 * kStepPanels * kSumValues * sizeof(float));
    const Scratch sums(static_cast<size_t>(count * plan_.value_panels * kSumValues) * sizeof(float));
    const Scratch states(static_cast<size_t>(count) * sizeof(State));
    keys_ = keys.as<uint8_t>();
    values_ = values.as<uint8_t>();
    queries_ = queries.as<uint8_t>();
    probabilities_ = probabilities.as<Bf16>();
    scores_ = scores.as<float>();
    sums_ = sums.as<float>();
    states_ = states.as<State>();
    __builtin_memset(probabilities_, 0, 2 * kStepPanels * kSumValues * sizeof(Bf16));
    if (call_.depth == 0) __builtin_memset(keys_, 0, static_cast<size_t>(plan_.chunk_keys) * 64);
    for (int64_t block = blocks_.begin; block < blocks_.end; ++block) begin_block(block);

    const KeyRange wanted = plan_.keys_of(blocks_);
    for (int64_t key = 0; key < wanted.end; key += plan_.chunk_keys) {
      if (key + plan_.chunk_keys <= wanted.begin) continue;
      begin_chunk(key);
      for (int64_t block = blocks_.begin; block < blocks_.end; ++block) chunk_of_block(block);
      advance(nullptr);
      advance(nullptr);
    }
    for (int64_t block = blocks_.begin; block < blocks_.end; ++block) {
      const KeyRange seen = plan_.keys_of({block, block + 1});
      if (seen.begin >= seen.end) write_zeros(block);
    }
  }

 private:
  State* state_of(int64_t block) const { return states_ + (block - blocks_.begin); }
  float* sums_of(int64_t block) const { return sums_ + (block - blocks_.begin) * plan_.value_panels * kSumValues; }
  // Of a step: steps take two places in turns.
  float* scores_of(int64_t place) const { return scores_ + place * kStepPanels * kSumValues; }
  Bf16* probabilities_of(int64_t place) const { return probabilities_ + place * kStepPanels * kSumValues; }

  void begin_chunk(int64_t key) {
    chunk_ = key;
    const HeadRows<Bf16> keys = head_->some_keys(key, plan_.chunk_keys);
    keys_magnitude_ = largest_magnitude(keys);
    pack_keys<Bf16>(keys, keys_);
    pack_values<Bf16>(head_->some_values(key, plan_.chunk_keys), plan_.value_panel_bytes, values_, true);
  }

  void chunk_of_block(int64_t block) {
    const KeyRange seen = plan_.keys_of({block, block + 1});
    const int64_t end = minimum(seen.end, chunk_ + plan_.chunk_keys);
    for (int64_t key = chunk_; key < end; key += plan_.step_keys) {
      if (key + plan_.step_keys <= seen.begin) continue;
      const TileStep step{block, key, minimum(plan_.step_keys, seen.end - key), key <= seen.begin,
                          seen.end <= key + plan_.step_keys};
      advance(&step);
    }
  }

  struct Nothing {
    XOPT_INLINE void step() const {}
  };

  // `next`: nullptr where no more steps follow.
  void advance(const TileStep* next) {
    if (has_scores_) {
      make_probabilities(next);
    } else {
      Nothing nothing;
      multiply(next, nothing);
    }
    if (has_probabilities_ && likely_.last) write(likely_.block);
    has_probabilities_ = has_scores_;
    likely_ = scored_;
    has_scores_ = next != nullptr;
    if (next != nullptr) scored_ = *next;
    place_ = 1 - place_;
  }

  // What the vector ports do between products: the softmax of the step whose scores are there. It needs no largest score
  // but that of the row block's first step, as long as no other is 2^40 times as likely.
  void make_probabilities(const TileStep* next) {
    const Range rows = plan_.rows_of_block(scored_.block);
    const ScoreBlock block{scores_of(place_), kPanelColumns, kSumValues, rows.size(), scored_.count};
    State* state = state_of(scored_.block);
    const float reach = reach_of_scores(call_, state->magnitude, keys_magnitude_);
    Softmax softmax(call_, block, state, probabilities_of(place_), kPanelColumns, kSumValues, reach < kReachOfWords);
    const bool masked = !(softmax.scales_later() && head_->sees_all(rows, scored_.key, scored_.count));
    const bool reuses = !scored_.first && reach < kReachOfReuse && !adds_to_scores(call_);
    scales_[place_] = !reuses && !scored_.first;
    // Of several panels of whole tiles the last may be stored by the products to come, before its turn.
    if (masked || !reuses || rows.size() < kRows || scored_.count <= kPanelColumns) products_.finish();
    if (masked) mask(scored_, &softmax);
    if (reuses) {
      softmax.reuse_largest();
    } else {
      if (!masked) softmax.look_at(0, rows.size());
      softmax.take_largest(factors_[place_]);
    }
    const int64_t whole = softmax.by_words() ? scored_.count / kPanelColumns : 0;
    const __m512i most = multiply_and_exponentiate(next, softmax, whole);
    exponentiate(&softmax, rows, whole);
    if (!reuses || !softmax.outgrew_largest(most)) return;
    softmax.look_at(0, rows.size());
    softmax.take_largest(factors_[place_]);
    scales_[place_] = true;
    exponentiate(&softmax, rows, 0);
  }

  // Of panels from `panel` on.
  void exponentiate(Softmax* softmax, Range rows, int64_t panel) const {
    for (; panel * kPanelColumns < scored_.count; ++panel) softmax->exponentiate(panel, 0, rows.size());
  }

  // The products, and between them the probabilities of so many whole panels. Returns the largest of their counts.
  __m512i multiply_and_exponentiate(const TileStep* next, const Softmax& softmax, int64_t panels) {
    if (adds_to_scores(call_)) return multiply_and_exponentiate<true>(next, softmax, panels);
    return multiply_and_exponentiate<false>(next, softmax, panels);
  }
  template <bool Adds>
  __m512i multiply_and_exponentiate(const TileStep* next, const Softmax& softmax, int64_t panels) {
    if (plan_.rows_at_once == 1) return multiply_and_exponentiate<1, Adds>(next, softmax, panels);
    if (plan_.rows_at_once == 2) return multiply_and_exponentiate<2, Adds>(next, softmax, panels);
    return multiply_and_exponentiate<4, Adds>(next, softmax, panels);
  }
  template <int64_t Rows, bool Adds>
  [[gnu::noinline]] __m512i multiply_and_exponentiate(const TileStep* next, const Softmax& softmax, int64_t panels) {
    alignas(64) float references[kRows];
    softmax.find_references(references);
    ExponentialsBetween<Rows, Adds> between(scores_of(place_), probabilities_of(place_), references,
                                            softmax.count_of_score(), plan_.rows_of_block(scored_.block).size(),
                                            panels);
    multiply(next, between);
    between.finish();
    return between.most();
  }

  // The products of the steps before and after. Scores of the last panel may still be in tiles then.
  template <class Work>
  XOPT_INLINE void multiply(const TileStep* next, Work& between) {
    if (has_probabilities_) add_values(likely_, 1 - place_, between);
    if (next != nullptr) {
      find_scores(*next, 1 - place_, between);
    } else {
      products_.finish();
    }
  }

  template <class Work>
  XOPT_INLINE void find_scores(const TileStep& step, int64_t place, Work& between) {
    const Range rows = plan_.rows_of_block(step.block);
    const Queries queries = queries_of(step.block);
    const uint8_t* panel = keys_ + (step.key - chunk_) / kPanelColumns * plan_.key_panel_bytes;
    float* sums = scores_of(place);
    for (int64_t left = step.count; left > 0; left -= kPanelColumns) {
      products_.run({queries.rows, queries.stride, 64, panel, plan_.depth_tiles, sums, false, rows.size(), left},
                    between);
      panel += plan_.key_panel_bytes;
      sums += kSumValues;
    }
  }

  template <class Work>
  XOPT_INLINE void add_values(const TileStep& step, int64_t place, Work& between) {
    const auto* words = reinterpret_cast<const uint8_t*>(probabilities_of(place));
    const uint8_t* panel = values_ + (step.key - chunk_) / kPanelColumns * 2 * kTileBytes;
    float* sums = sums_of(step.block);
    const int64_t k_tiles = ceil_div(step.count, kPanelColumns), rows = plan_.rows_of_block(step.block).size();
    const ScoreBlock all{sums, kPanelColumns, kSumValues, rows, plan_.value_tiles * kTileColumns};
    if (scales_[place]) all.scale_rows(factors_[place]);
    for (int64_t left = plan_.value_tiles; left > 0; left -= 2) {
      products_.run({words, 64, kSumValues * 2, panel, k_tiles, sums, !step.first, rows, left * kTileColumns}, between);
      panel += plan_.value_panel_bytes;
      sums += kSumValues;
    }
  }

  void mask(const TileStep& step, Softmax* softmax) {
    const PlacedRows placed = placed_rows(step.block);
    head_->mask(placed.rows, placed.places, step.key, step.count, &mask_, softmax);
  }

  struct PlacedRows {
    Range rows;
    RowPlace places[kRows];
  };
  PlacedRows placed_rows(int64_t block) const {
    PlacedRows placed{plan_.rows_of_block(block), {}};
    find_places(call_, placed.rows.begin, placed.rows.size(), placed.places);
    return placed;
  }

  // A row block's queries, whose rows are `stride` bytes apart.
  struct Queries {
    const uint8_t* rows;
    int64_t stride;
  };
  Queries queries_of(int64_t block) const {
    if (const uint8_t* in_place = queries_in_place(block)) return {in_place, plan_.query_step};
    return {copies_of(block), plan_.query_bytes};
  }
  uint8_t* copies_of(int64_t block) const { return queries_ + (block - blocks_.begin) * kRows * plan_.query_bytes; }

  // Where the row block's queries begin, if tiles can read them there: whole rows of tiles, which begin where lines of the
  // cache do. Else nullptr.
  const uint8_t* queries_in_place(int64_t block) const {
    if (!plan_.reads_queries) return nullptr;
    const Range rows = plan_.rows_of_block(block);
    const auto* first = reinterpret_cast<const uint8_t*>(head_->queries({rows.begin, 0}));
    return reinterpret_cast<uintptr_t>(first) % 64 == 0 && rows.size() % kTileRows == 0 ? first : nullptr;
  }

  void begin_block(int64_t block) const {
    const PlacedRows placed = placed_rows(block);
    State* state = state_of(block);
    state->clear();
    state->magnitude = head_->magnitude_of_queries(placed.places, placed.rows.size());
    if (queries_in_place(block) == nullptr) copy_queries(placed, copies_of(block));
  }

  // Copies lie close together: at their own distance rows may meet in few sets of L1.
  void copy_queries(const PlacedRows& placed, uint8_t* to) const {
    const int64_t bytes = call_.depth * 2, padded = plan_.depth_tiles * 64, rows = placed.rows.size();
    for (int64_t row = 0; row < rows; ++row, to += plan_.query_bytes) {
      if (padded > bytes) __builtin_memset(to + padded - 64, 0, 64);
      copy_bytes(head_->queries(placed.places[row]), bytes, to);
    }
    for (int64_t row = rows; row < round_up(rows, kTileRows); ++row, to += plan_.query_bytes) {
      __builtin_memset(to, 0, static_cast<size_t>(padded));
    }
  }

  // Sums divided by those of the probabilities, which are their last column.
  void write(int64_t block) const {
    const PlacedRows placed = placed_rows(block);
    const float* sums = sums_of(block);
    const float* of_row = sums + call_.value_depth / kPanelColumns * kSumValues + call_.value_depth % kPanelColumns;
    for (int64_t row = 0; row < placed.rows.size(); ++row) {
      const float sum = of_row[row * kPanelColumns];
      const float inverse = head_->inverse_of(placed.places[row], sum, state_of(block)->largest[row]);
      Bf16* out = head_->out(placed.places[row]);
      for (int64_t column = 0; column < call_.value_depth; column += kPanelColumns) {
        write_scaled(sums + column / kPanelColumns * kSumValues + row * kPanelColumns, inverse,
                     minimum(kPanelColumns, call_.value_depth - column), out + column);
      }
    }
  }
  void write_zeros(int64_t block) const {
    const PlacedRows placed = placed_rows(block);
    for (int64_t row = 0; row < placed.rows.size(); ++row) {
      __builtin_memset(head_->out(placed.places[row]), 0, static_cast<size_t>(call_.value_depth) * sizeof(Bf16));
    }
  }

  const AttentionCall& call_;
  const TilePlan& plan_;
  MaskRow mask_;
  const AttentionHead<Bf16>* head_ = nullptr;
  Range blocks_{};
  int64_t chunk_ = 0;                            // its first key
  uint8_t *keys_ = nullptr, *values_ = nullptr;  // panels of a chunk
  uint8_t* queries_ = nullptr;                   // copies: [row block][row]
  Bf16* probabilities_ = nullptr;                // [place][panel][row][32]
  float *scores_ = nullptr, *sums_ = nullptr;    // [place][panel][row][32], [row block][panel][row][32]
  State* states_ = nullptr;                      // [row block]
  float keys_magnitude_ = 0;                     // of the chunk
  // Steps under way: one whose scores are there, and the one before, whose probabilities are.
  TileStep scored_{}, likely_{};
  bool has_scores_ = false, has_probabilities_ = false;
  int64_t place_ = 0;
  TileProducts products_;
  bool scales_[2] = {};  // whether sums before the step have to be multiplied by its factors
  alignas(64) float factors_[2][kRows];
};

inline void attention_on_tiles(const AttentionCall& call) {
  const TilePlan plan(call);
  for_each_item(plan.items, plan.threads, [&] {
    return [&, scope = TileScope(), thread = TileAttention(call, plan)](int64_t item) mutable { thread.compute(item); };
  });
}

}  // namespace xopt::XOPT_ISA
#endif
