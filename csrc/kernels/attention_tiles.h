// Attention on tiles: three steps are under way at a time. While the vector ports make probabilities of a step's scores,
// the matrix unit multiplies queries and keys of the next step, and probabilities and values of the one before.
//
//   item               a head of keys x a range of row blocks, whichever thread takes it
//    chunk of keys      packed into panels, which stay in L2 (keys: by column, values: by row)
//     row block          32 rows; their sums, queries and states stay in L1
//      step               64 or 128 keys: scores = queries * keys; softmax; sums += probabilities * values
//
// What is left of an online softmax: the largest of a row block's first scores is subtracted from all of them, unless
// others outgrow it by far. Where a chunk has all keys, even that is taken for 0 at first, and what comes out as nothing is
// done again. Sums of probabilities are one more column of values, which is ones: products are what there is time for.
#pragma once

#include "kernels/attention_exponentials.h"
#include "kernels/attention_head.h"
#include "kernels/attention_pack.h"
#include "kernels/attention_tile_rows.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/tile_products.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// A row block's scores with some keys of a chunk.
struct TileStep {
  TileRows* block;
  int64_t key, count;
  bool first, last;  // of the row block: overwrites its sums; completes them
};

class TileAttention {
  using Softmax = SoftmaxStep<TilePlan::kRows, Bf16, false>;
  static constexpr int64_t kRows = TilePlan::kRows, kMostStepKeys = TilePlan::kMostStepKeys;
  static constexpr int64_t kSumValues = kRows * kPanelColumns;  // of a panel
  static constexpr int64_t kStepPanels = kMostStepKeys / kPanelColumns;

 public:
  TileAttention(const AttentionCall& call, const TilePlan& plan) : call_(call), plan_(plan), mask_(call.mask) {}

  void compute(int64_t item) {
    const auto head = plan_.head_of<Bf16>(item);
    const TileRowsOfHead rows(plan_, head);
    head_ = &head;
    rows_ = &rows;
    const Range range = plan_.blocks_of(item);
    const Scratch keys(static_cast<size_t>(plan_.chunk_keys / kPanelColumns * plan_.key_panel_bytes));
    const Scratch values(static_cast<size_t>(plan_.value_panels * plan_.value_panel_bytes));
    const Scratch queries(static_cast<size_t>(range.size() * kRows * plan_.query_bytes));
    const Scratch probabilities(2 * kStepPanels * kSumValues * sizeof(Bf16));
    const Scratch scores(2 * kStepPanels * kSumValues * sizeof(float));
    // Sums of a row block that sees all its keys in one chunk are written before the next ones begin.
    const int64_t sums_of_block = plan_.value_panels * kSumValues, next_sums = plan_.has_chunks ? sums_of_block : 0;
    const Scratch sums(static_cast<size_t>((range.size() - 1) * next_sums + sums_of_block) * sizeof(float));
    const Scratch blocks(static_cast<size_t>(range.size()) * sizeof(TileRows));
    keys_ = keys.as<uint8_t>();
    values_ = values.as<uint8_t>();
    probabilities_ = probabilities.as<Bf16>();
    scores_ = scores.as<float>();
    auto* const first = blocks.as<TileRows>();
    auto* const last = first + range.size();
    if (call_.depth == 0) __builtin_memset(keys_, 0, static_cast<size_t>(plan_.chunk_keys) * 64);
    for (int64_t i = 0; i < range.size(); ++i) {
      rows.begin(range.begin + i, sums.as<float>() + i * next_sums,
                 queries.as<uint8_t>() + i * kRows * plan_.query_bytes, first + i);
    }

    const KeyRange wanted = plan_.keys_of(range);
    for (int64_t key = 0; key < wanted.end; key += plan_.chunk_keys) {
      if (key + plan_.chunk_keys <= wanted.begin) continue;
      begin_chunk(key);
      guesses_ = !plan_.has_chunks;
      for (TileRows* block = first; block != last; ++block) chunk_of_block(block);
      finish_steps();
      for (TileRows* block = first; block != last; ++block) {
        if (block->is_lost) chunk_again(block);
      }
    }
    for (const TileRows* block = first; block != last; ++block) {
      if (block->seen.begin >= block->seen.end) rows.write_zeros(*block);
    }
  }

 private:
  // Of a step: steps take two places in turns.
  float* scores_of(int64_t place) const { return scores_ + place * kStepPanels * kSumValues; }
  Bf16* probabilities_of(int64_t place) const { return probabilities_ + place * kStepPanels * kSumValues; }

  void begin_chunk(int64_t key) {
    chunk_ = key;
    const HeadRows<Bf16> keys = head_->some_keys(key, plan_.chunk_keys);
    keys_magnitude_ = largest_magnitude(keys);
    pack_keys<Bf16>(keys, keys_);
    fill_panel(keys.count);
    pack_values<Bf16>(head_->some_values(key, plan_.chunk_keys), plan_.value_panel_bytes, values_, true);
  }

  // With zeros, if the last panel of so many keys has columns of one tile only.
  void fill_panel(int64_t count) const {
    if (count % kPanelColumns == 0 || count % kPanelColumns > kTileColumns) return;
    uint8_t* tile = keys_ + count / kPanelColumns * plan_.key_panel_bytes + kTileBytes;
    for (int64_t k = 0; k < plan_.depth_tiles; ++k, tile += 2 * kTileBytes) __builtin_memset(tile, 0, kTileBytes);
  }

  void chunk_of_block(TileRows* block) {
    const int64_t end = minimum(block->seen.end, chunk_ + plan_.chunk_keys);
    for (int64_t key = chunk_; key < end; key += plan_.step_keys) {
      if (key + plan_.step_keys <= block->seen.begin) continue;
      if (all_is_known(block)) key = advance_through(key, minimum(end, block->seen_by_all.end));
      if (key >= end) return;
      const TileStep step = step_at(block, key);
      advance(&step);
    }
  }
  void finish_steps() {
    advance(nullptr);
    advance(nullptr);
  }
  // Of a block whose scores are far below 0, all of a row's.
  void chunk_again(TileRows* block) {
    guesses_ = false;
    block->begin();
    chunk_of_block(block);
    finish_steps();
  }
  TileStep step_at(TileRows* block, int64_t key) const {
    const KeyRange seen = block->seen;
    return {block, key, minimum(plan_.step_keys, seen.end - key), key <= seen.begin, seen.end <= key + plan_.step_keys};
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
    if (has_probabilities_ && likely_.last) rows_->write(likely_.block);
    take_next(next);
  }
  XOPT_INLINE void take_next(const TileStep* next) {
    has_probabilities_ = has_scores_;
    likely_ = scored_;
    has_scores_ = next != nullptr;
    if (next != nullptr) scored_ = *next;
    place_ = 1 - place_;
  }

  // Of the step whose scores are there.
  float reach() const { return reach_of_scores(call_, scored_.block->magnitude, keys_magnitude_); }
  Softmax begin_softmax() const {
    const ScoreBlock block{scores_of(place_), kPanelColumns, kSumValues, scored_.block->rows.size(), scored_.count};
    return {call_, block, scored_.block, probabilities_of(place_), kPanelColumns, kSumValues, reach() < kReachOfWords};
  }

  // What the vector ports do between products: the softmax of the step whose scores are there. No largest score is looked
  // for but a row block's first, where that is not taken for 0, as long as no other is 2^40 times as likely.
  void make_probabilities(const TileStep* next) {
    const Range rows = scored_.block->rows;
    Softmax softmax = begin_softmax();
    const bool reuses = (guesses_ || !scored_.first) && reach() < kReachOfReuse && !adds_to_scores(call_);
    // Keys that fill up the last panel are zeros, and so are their values and the ones beside these: nothing is added.
    const bool padded = reuses && scored_.key + scored_.count == call_.keys;
    const bool masked = !(softmax.scales_later() && (padded || scored_.count % kWidth == 0) &&
                          head_->sees_all(rows, scored_.key, scored_.count));
    scales_[place_] = !reuses && !scored_.first;
    // Of several panels the last may be stored by the products to come, before its turn.
    if (masked || !reuses || scored_.count <= kPanelColumns) products_.finish();
    if (masked) mask(scored_, &softmax);
    if (reuses) {
      if (scored_.first) {
        softmax.guess_largest(masked);
        scored_.block->is_guess = true;
      }
      softmax.reuse_largest();
    } else {
      if (!masked) softmax.look_at(0, rows.size());
      softmax.take_largest(factors_[place_]);
    }
    const int64_t panels = padded && !masked ? ceil_div(scored_.count, kPanelColumns) : scored_.count / kPanelColumns;
    const int64_t whole = softmax.by_words() ? panels : 0;
    const __m512i most = multiply_and_exponentiate(next, softmax, whole);
    exponentiate(&softmax, whole);
    if (reuses && softmax.outgrew_largest(most)) exponentiate_anew(&softmax, masked);
  }

  // Of panels from `panel` on.
  void exponentiate(Softmax* softmax, int64_t panel) const {
    const int64_t rows = scored_.block->rows.size();
    for (; panel * kPanelColumns < scored_.count; ++panel) softmax->exponentiate(panel, 0, rows);
  }
  void exponentiate_anew(Softmax* softmax, bool masked) {
    if (masked || scored_.count % kWidth == 0) {
      softmax->look_at(0, scored_.block->rows.size());
    } else {
      mask(scored_, softmax);  // keys that do not exist
    }
    softmax->take_largest(factors_[place_]);
    scales_[place_] = !scored_.first;
    exponentiate(softmax, 0);
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
    const References references(softmax);
    ExponentialsBetween<Rows, Adds> between(scores_of(place_), probabilities_of(place_), references.of_row,
                                            softmax.count_of_score(), panels * kRows);
    multiply(next, between);
    between.finish();
    return between.most();
  }
  // Of all panels' rows, the same for each.
  struct References {
    explicit References(const Softmax& softmax) {
      softmax.find_references(of_row);
      for (int64_t row = 0; row < (kStepPanels - 1) * kRows; row += kWidth) {
        store(of_row + kRows + row, load(of_row + row));
      }
    }
    alignas(64) float of_row[kStepPanels * kRows];
  };

  // Whether the probabilities of the step whose scores are there, one of this block, need nothing but those, like all steps
  // to come whose keys are seen by all rows.
  bool all_is_known(const TileRows* block) const {
    return has_scores_ && has_probabilities_ && scored_.block == block && !scored_.first && likely_.block == block &&
           call_.mask.kind == MaskKind::none && call_.scale > 0 && reach() < kReachOfReuse &&
           block->seen_by_all.begin <= scored_.key;
  }
  // Advances through steps of as many keys as there can be, up to `end`, and returns the first key that is left. A loop of
  // its own: with all that is decided for a step otherwise, 4096 keys took up to 1.08 times as long.
  int64_t advance_through(int64_t key, int64_t end) {
    if (plan_.rows_at_once == 1) return advance_through<1>(key, end);
    if (plan_.rows_at_once == 2) return advance_through<2>(key, end);
    return advance_through<4>(key, end);
  }
  template <int64_t Rows>
  [[gnu::noinline]] int64_t advance_through(int64_t key, int64_t end) {
    Softmax softmax = begin_softmax();
    softmax.reuse_largest();
    const References references(softmax);
    bool outgrown = false;
    for (; !outgrown && key + plan_.step_keys <= end; key += plan_.step_keys) {
      const TileStep next = step_at(scored_.block, key);
      ExponentialsBetween<Rows, false> between(scores_of(place_), probabilities_of(place_), references.of_row,
                                               softmax.count_of_score(), scored_.count / kPanelColumns * kRows);
      multiply(&next, between);
      between.finish();
      scales_[place_] = false;
      outgrown = softmax.outgrew_largest(between.most());
      if (outgrown) {
        Softmax anew = begin_softmax();
        exponentiate_anew(&anew, false);
      }
      take_next(&next);
    }
    return key;
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
    const TileRows& block = *step.block;
    const uint8_t* panel = keys_ + (step.key - chunk_) / kPanelColumns * plan_.key_panel_bytes;
    float* sums = scores_of(place);
    for (int64_t left = step.count; left > 0; left -= kPanelColumns) {
      products_.run<true>({block.queries, block.query_bytes, 64, panel, plan_.depth_tiles, sums, false}, between);
      panel += plan_.key_panel_bytes;
      sums += kSumValues;
    }
  }

  template <class Work>
  XOPT_INLINE void add_values(const TileStep& step, int64_t place, Work& between) {
    const auto* words = reinterpret_cast<const uint8_t*>(probabilities_of(place));
    const uint8_t* panel = values_ + (step.key - chunk_) / kPanelColumns * 2 * kTileBytes;
    float* sums = step.block->sums;
    const int64_t k_tiles = ceil_div(step.count, kPanelColumns);
    if (scales_[place]) scale_sums(*step.block, factors_[place]);
    int64_t left = plan_.value_tiles;
    for (; left > 1; left -= 2) {
      products_.run<true>({words, 64, kSumValues * 2, panel, k_tiles, sums, !step.first}, between);
      panel += plan_.value_panel_bytes;
      sums += kSumValues;
    }
    if (left > 0) {
      products_.run<false>({words, 64, kSumValues * 2, panel, k_tiles, sums, !step.first}, between);
    }
  }

  void scale_sums(const TileRows& block, const float* factors) const {
    const int64_t columns = plan_.value_tiles * kTileColumns;
    ScoreBlock{block.sums, kPanelColumns, kSumValues, block.rows.size(), columns}.scale_rows(factors);
  }

  void mask(const TileStep& step, Softmax* softmax) {
    const PlacedRows placed(call_, step.block->rows);
    head_->mask(placed.rows, placed.places, step.key, step.count, &mask_, softmax);
  }

  const AttentionCall& call_;
  const TilePlan& plan_;
  MaskRow mask_;
  const AttentionHead<Bf16>* head_ = nullptr;
  const TileRowsOfHead* rows_ = nullptr;
  int64_t chunk_ = 0;                            // its first key
  uint8_t *keys_ = nullptr, *values_ = nullptr;  // panels of a chunk
  Bf16* probabilities_ = nullptr;                // [place][panel][row][32]
  float* scores_ = nullptr;                      // [place][panel][row][32]
  float keys_magnitude_ = 0;                     // of the chunk
  // Steps under way: one whose scores are there, and the one before, whose probabilities are.
  TileStep scored_{}, likely_{};
  bool has_scores_ = false, has_probabilities_ = false;
  int64_t place_ = 0;
  bool guesses_ = false;  // that the largest of the first scores is 0
  alignas(64) float nowhere_[TileProducts::kSums];
  TileProducts products_{nowhere_};
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
