// The softmax of a block of scores as one step of an online softmax: mask, the maximum so far, scale, exponentials.
#pragma once

#include <type_traits>

#include "kernels/attention.h"
#include "tiles/exp2_words.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/reduce_rows.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Keys between two looks at the maximum, but for tiles. More make fewer of them.
inline constexpr int64_t kKeyBlock = 384;
// The most that a call may ask for.
inline constexpr int64_t kMostKeys = 1024;
inline constexpr float kInfinity = __builtin_inff(), kLog2E = 1.44269504F;

alignas(64) inline constexpr float kColumnNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Which keys a query sees, whatever the mask says: [begin, end).
struct KeyRange {
  int64_t begin, end;
};
XOPT_INLINE KeyRange keys_of_queries(const AttentionCall& call, int64_t first, int64_t last) {
  const int64_t begin = maximum<int64_t>(0, first + call.first_offset);
  return {begin, minimum(call.keys, last + call.last_offset + 1)};
}

// A row's part of a mask, as what is added to its scores.
class MaskRow {
 public:
  explicit MaskRow(const AttentionMask& mask) : mask_(mask) {}

  // nullptr without a mask. Neighbouring rows often share one (a mask of padding keys): it is converted once.
  const float* load(int64_t batch, int64_t head, int64_t query, int64_t key, int64_t count) {
    if (mask_.kind == MaskKind::none) return nullptr;
    const int64_t offset = mask_.offset(batch, head) + query * mask_.row_stride;
    if (offset == offset_ && key == key_ && count == count_) return bias_;
    offset_ = offset;
    key_ = key;
    count_ = count;
    const int64_t first = offset + key * mask_.column_stride;
    switch (mask_.kind) {
      case MaskKind::allowed:
        convert_allowed(static_cast<const uint8_t*>(mask_.data) + first);
        break;
      case MaskKind::f32:
        convert(static_cast<const float*>(mask_.data) + first);
        break;
      case MaskKind::bf16:
        convert(static_cast<const Bf16*>(mask_.data) + first);
        break;
      default:
        convert(static_cast<const F16*>(mask_.data) + first);
    }
    const int64_t padded = round_up(count, kPanelColumns);
    for (int64_t i = count; i < padded; ++i) bias_[i] = 0;
    return bias_;
  }

 private:
  void convert_allowed(const uint8_t* from) {
    if (mask_.column_stride == 1) {
      for (int64_t i = 0; i < count_; ++i) bias_[i] = from[i] != 0 ? 0.0F : -kInfinity;
    } else {
      for (int64_t i = 0; i < count_; ++i) bias_[i] = from[i * mask_.column_stride] != 0 ? 0.0F : -kInfinity;
    }
  }

  template <class T>
  void convert(const T* from) {
    if (mask_.column_stride == 1) return convert_run<float>(from, count_, bias_);
    for (int64_t i = 0; i < count_; ++i) store_first(bias_ + i, load_first(from + i * mask_.column_stride, 1), 1);
  }

  const AttentionMask& mask_;
  int64_t offset_ = 0, key_ = -1, count_ = 0;
  alignas(64) float bias_[kMostKeys];
};

// How large a score can be, before masks add to it, as a power of two: of queries and keys of these magnitudes.
inline float reach_of_scores(const AttentionCall& call, float queries, float keys) {
  return static_cast<float>(call.depth) * queries * keys * __builtin_fabsf(call.scale) * kLog2E;
}
// Within this reach no sum is infinite or NaN, which integers do not know.
inline constexpr float kReachOfWords = 0x1p100F;
// Within this, the difference of two scores is a count of 31 bits (exp2_words.h).
inline constexpr float kReachOfReuse = 0x1p20F;

// Of the keys so far. The largest score is -inf, and the sum 0, as long as a row saw none.
template <int64_t N>  // rows, a multiple of kWidth
struct SoftmaxState {
  alignas(64) float largest[N], sum[N];

  void clear() {
    for (int64_t row = 0; row < N; ++row) {
      largest[row] = -kInfinity;
      sum[row] = 0;
    }
  }
};

// Scores of rows with a block of keys, or sums of values, in panels of 32 columns. Those beyond `columns` are nobody's.
struct ScoreBlock {
  float* scores;
  int64_t row_stride, panel_stride, rows, columns;

  // Calls step(scores, column) for each vector of a row.
  template <class Step>
  XOPT_INLINE void for_vectors(int64_t row, const Step& step) const {
    float* panel = scores + row * row_stride;
    for (int64_t column = 0; column < columns; column += kPanelColumns, panel += panel_stride) {
      const int64_t count = minimum(kPanelColumns, columns - column);
      for (int64_t i = 0; i < count; i += kWidth) step(panel + i, column + i);
    }
  }

  void scale_rows(const float* factors) const {
    for (int64_t row = 0; row < rows; ++row) {
      if (factors[row] == 1.0F) continue;
      const F factor = set1(factors[row]);
      for_vectors(row, [&](float* at, int64_t) { store(at, mul(load(at), factor)); });
    }
  }
};

// 2^x for x of at most 0, or what rounding leaves above it, and NaN; 0 below 2^-125. x is a whole number and a rest, of
// which 2^rest is a polynomial, of relative error 1.5e-7.
XOPT_INLINE F exp2_of_negative(F x) {
  const F least = set1(-125.0F), inside = max(least, x), rest = fraction(inside);
  F p = set1(1.877576695e-3F);
  p = fma(p, rest, set1(8.989340626e-3F));
  p = fma(p, rest, set1(5.582631752e-2F));
  p = fma(p, rest, set1(2.401536107e-1F));
  p = fma(p, rest, set1(6.931530833e-1F));
  p = fma(p, rest, set1(9.999999404e-1F));
  return select_less(x, least, set1(0.0F), scale_by_floor(p, inside));
}

// Masks a row of scores, after scaling them where `Scaled`, and returns the largest, lane by lane. `seen`: columns, the
// others count as -inf. `bias`: nullptr, or what is added. `endless`: gets a lane above 0 where NaN or infinity come out.
template <bool Cut, bool Scaled>
F mask_scores(const ScoreBlock& block, int64_t row, KeyRange seen, const float* bias, float scale, F* endless) {
  const F nothing = set1(-kInfinity), factor = set1(scale);
  const F first = set1(static_cast<float>(seen.begin)), last = set1(static_cast<float>(seen.end - 1));
  F largest = nothing, without_end = *endless;
  block.for_vectors(row, [&](float* scores, int64_t column) {
    F s = load(scores);
    if constexpr (Scaled) s = mul(s, factor);
    if (bias != nullptr) {
      s = add(s, load(bias + column));
      without_end = select_less(s, set1(kInfinity), without_end, set1(1.0F));
    }
    const bool cut = Cut && (column < seen.begin || column + kWidth > seen.end);
    if (cut) {
      const F number = add(load(kColumnNumbers), set1(static_cast<float>(column)));
      s = select_less(number, first, nothing, s);
      s = select_less(last, number, nothing, s);
    }
    if (cut || Scaled || bias != nullptr) store(scores, s);
    largest = max(s, largest);  // passes over NaN, which the exponentials bring into the sum
  });
  *endless = without_end;
  return largest;
}

// Whether a mask adds something between nothing and -inf.
inline bool adds_to_scores(const AttentionCall& call) {
  return call.mask.kind != MaskKind::none && call.mask.kind != MaskKind::allowed;
}
// What scores count in, as a power of two: ln 2 itself, or 1 where a mask adds the smallest of all floats, maybe.
inline float score_unit(const AttentionCall& call) { return adds_to_scores(call) ? kLog2E : 1.0F; }

// Takes what the rows found for their largest so far. `references`: what is subtracted from their scores; `factors`:
// what sums made before have to be multiplied by.
template <int64_t N>
void update_largest(SoftmaxState<N>* state, float unit, const float* found, float* references, float* factors) {
  const F nothing = set1(-kInfinity), zero = set1(0.0F), one = set1(1.0F);
  for (int64_t row = 0; row < N; row += kWidth) {
    const F before = load(state->largest + row), largest = max(before, load(found + row));
    const F reference = select_less(nothing, largest, largest, zero);  // -inf minus -inf would be NaN
    store(state->largest + row, largest);
    store(references + row, reference);
    const F factor = exp2_of_negative(mul(sub(before, reference), set1(unit)));
    store(factors + row, select_less(before, reference, factor, one));
  }
}

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
// Scores as the counts that exp2_words.h takes. `Adds`: whether a mask was added to them. What a row's counts begin with, if
// this is subtracted from its scores, or with a mask that itself; and a score's count.
template <bool Adds>
XOPT_INLINE F count_reference(F subtracted) {
  return Adds ? subtracted : fma(subtracted, set1(-kExp2Scale), set1(kExp2Offset));
}
template <bool Adds>
XOPT_INLINE F count_of(F score, F reference, F scale) {
  return Adds ? fma(sub(score, reference), scale, set1(kExp2Offset)) : fma(score, scale, reference);
}
#endif

// A block of scores on its way to probabilities. The instruction that subtracts the largest scales, too, unless masks
// add to scores, which comes in between. `Sums`: whether it sums the probabilities; else it notes the largest.
template <int64_t N, class To, bool Sums = true>
class SoftmaxStep {
 public:
  // Probabilities go into `to`, rows and panels so far apart, with zeros up to a multiple of 32 columns. `by_words`: scores
  // reach no further than kReachOfWords.
  SoftmaxStep(const AttentionCall& call, const ScoreBlock& block, SoftmaxState<N>* state, To* to, int64_t to_stride,
              int64_t to_panel_stride, bool by_words)
      : call_(call),
        block_(block),
        state_(state),
        to_(to),
        to_stride_(to_stride),
        to_panel_stride_(to_panel_stride),
        scale_(adds_to_scores(call) ? call.scale : call.scale * kLog2E),
        scales_later_(!adds_to_scores(call) && scale_ > 0),
        by_words_(by_words) {}

  // Masks rows, and looks at them.
  template <class Seen, class Bias>
  void mask(const Seen& seen, const Bias& bias) {
    F endless = set1(0.0F);
    for (int64_t row = 0; row < block_.rows; ++row) {
      const KeyRange keys = seen(row);
      const bool cut = keys.begin > 0 || keys.end < round_up(block_.columns, kWidth);
      const auto mask_row = scales_later_ ? cut ? mask_scores<true, false> : mask_scores<false, false>
                            : cut         ? mask_scores<true, true>
                                          : mask_scores<false, true>;
      store(vectors_ + row * kWidth, mask_row(block_, row, keys, bias(row), scale_, &endless));
    }
    by_words_ = by_words_ && reduce_add(endless) == 0;
  }

  // Whether scores need not be scaled to be looked at.
  bool scales_later() const { return scales_later_; }

  // Looks at rows [begin, end), where nothing masks scores.
  void look_at(int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // Two, since each waits for the one before.
      F even = set1(-kInfinity), odd = even;
      const float* panel = block_.scores + row * block_.row_stride;
      int64_t left = block_.columns;
      for (; left >= kPanelColumns; left -= kPanelColumns, panel += block_.panel_stride) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kPanelColumns; i += 2 * kWidth) {
          even = max(load(panel + i), even);
          odd = max(load(panel + i + kWidth), odd);
        }
      }
      for (int64_t i = 0; i < left; i += kWidth) even = max(load(panel + i), even);
      store(vectors_ + row * kWidth, max(even, odd));
    }
  }
  // When all rows have been looked at. `factors`: what sums made before have to be multiplied by.
  void take_largest(float* factors) {
    alignas(64) float found[N];
    find_largest(found);
    for (int64_t row = 0; row < N; row += kWidth) store(found + row, mul(load(found + row), set1(later_scale())));
    update_largest(state_, score_unit(call_), found, references_, factors);
    if constexpr (!Sums) return;
    for (int64_t row = 0; row < block_.rows; ++row) {
      store(vectors_ + row * kWidth, set1(0.0F));
      state_->sum[row] *= factors[row];
    }
  }

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  // In place of taking the first largest: 0, but where a mask has left a row nothing. `masked`: rows were looked at.
  void guess_largest(bool masked) {
    alignas(64) float found[N] = {};
    if (masked) find_largest(found);
    const F nothing = set1(-kInfinity);
    for (int64_t row = 0; row < N; row += kWidth) {
      store(state_->largest + row, select_less(nothing, load(found + row), set1(0.0F), nothing));
    }
  }
  // In place of taking the largest, where words are made within kReachOfReuse, and masks do not add: subtracts what was the
  // largest so far. Afterwards, whether scores are so much larger that this will not do, as any are where there was none.
  void reuse_largest() {
    const F none = set1(-2 * kReachOfReuse);
    for (int64_t row = 0; row < N; row += kWidth) store(references_ + row, max(none, load(state_->largest + row)));
  }
  // Of these counts, or of those that it has made itself.
  bool outgrew_largest(__m512i counts) const {
    constexpr int kMost = 40;  // as a power of two: far from what overflows, were values and keys many
    constexpr auto kLimit = static_cast<uint16_t>(kExp2Offset + kExp2Scale * kMost);
    const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(kLimit));
    return _mm512_cmpgt_epu16_mask(_mm512_max_epu16(most_, counts), limit) != 0;
  }

  // Whether probabilities are made in integers, whose counts begin with these numbers of rows, or are of scores less what
  // find_references leaves there where masks add; and what a score counts.
  bool by_words() const { return by_words_; }
  void find_references(float* to) const {
    for (int64_t row = 0; row < N; row += kWidth) {
      const F subtracted = load(references_ + row);
      store(to + row, adds_to_scores(call_) ? count_reference<true>(subtracted) : count_reference<false>(subtracted));
    }
    for (int64_t row = block_.rows; row < N; ++row) to[row] = 0;  // of rows that are nobody's, however large they are
  }
  float count_of_score() const { return kExp2Scale * (adds_to_scores(call_) ? kLog2E : later_scale()); }
#endif

  // The probabilities of a panel of columns, in which there are scores, in rows [begin, end).
  void exponentiate(int64_t panel, int64_t begin, int64_t end) {
    const bool adds = adds_to_scores(call_);
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
    if constexpr (std::is_same_v<To, Bf16>) {
      if (by_words_) {
        return adds ? exponentiate_by_words<true>(panel, begin, end) : exponentiate_by_words<false>(panel, begin, end);
      }
    }
#endif
    adds ? exponentiate_by_floats<true>(panel, begin, end) : exponentiate_by_floats<false>(panel, begin, end);
  }

  // When all panels are done.
  void add_sums() {
    alignas(64) float sums[N];
    reduce_rows<N>(vectors_, block_.rows, 0.0F, sums, [](F x, F y) { return add(x, y); });
    for (int64_t row = 0; row < block_.rows; ++row) state_->sum[row] += sums[row];
  }

 private:
  void find_largest(float* found) {
    reduce_rows<N>(vectors_, block_.rows, -kInfinity, found, [](F x, F y) { return max(x, y); });
  }
  // What scores are yet to be scaled by.
  float later_scale() const { return scales_later_ ? scale_ : 1.0F; }

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  // Sums are of the words, so what rounding adds to all of them alike does not count.
  template <bool Adds>
  void exponentiate_by_words(int64_t panel, int64_t begin, int64_t end) {
    const int64_t column = panel * kPanelColumns, row_stride = block_.row_stride, to_stride = to_stride_;
    const bool has_second = block_.columns - column > kWidth;
    const float* scores = block_.scores + panel * block_.panel_stride + begin * row_stride;
    To* to = to_ + panel * to_panel_stride_ + begin * to_stride;
    const F scale = set1(count_of_score());
    __m512i most = most_;
    for (int64_t row = begin; row < end; ++row, scores += row_stride, to += to_stride) {
      const F reference = count_reference<Adds>(set1(references_[row]));
      const auto count = [&](const float* from) { return count_of<Adds>(load(from), reference, scale); };
      const __m512i counts = exp2_counts(count(scores), has_second ? count(scores + kWidth) : set1(0.0F));
      const __m512i words = exp2_words(counts);
      if constexpr (!Sums) most = _mm512_max_epu16(most, counts);
      _mm512_storeu_si512(to, words);
      if constexpr (Sums) store(vectors_ + row * kWidth, add_words(load(vectors_ + row * kWidth), words));
    }
    most_ = most;
  }
#endif

  template <bool Adds>
  void exponentiate_by_floats(int64_t panel, int64_t begin, int64_t end) {
    const int64_t column = panel * kPanelColumns, left = block_.columns - column;
    const float* scores = block_.scores + panel * block_.panel_stride + begin * block_.row_stride;
    To* to = to_ + panel * to_panel_stride_ + begin * to_stride_;
    const F scale = set1(Adds ? kLog2E : later_scale());
    for (int64_t row = begin; row < end; ++row, scores += block_.row_stride, to += to_stride_) {
      const F reference = set1(references_[row]), subtracted = set1(-references_[row]);
      const auto probability = [&](int64_t i) {
        const F score = load(scores + i);
        return exp2_of_negative(Adds ? mul(sub(score, reference), scale) : fma(score, scale, subtracted));
      };
      F sum = Sums ? load(vectors_ + row * kWidth) : set1(0.0F);
      if (left >= kPanelColumns) {
        for (int64_t i = 0; i < kPanelColumns; i += 2 * kWidth) {
          const F x = probability(i), y = probability(i + kWidth);
          sum = add(sum, add(x, y));
          store_two(to + i, x, y);
        }
      } else {
        for (int64_t i = 0; i < left; i += kWidth) {
          const F x = probability(i);
          sum = add(sum, x);
          store(to + i, x);
        }
        for (int64_t i = round_up(left, kWidth); i < kPanelColumns; i += kWidth) store(to + i, set1(0.0F));
      }
      if constexpr (Sums) store(vectors_ + row * kWidth, sum);
    }
  }

  const AttentionCall& call_;
  const ScoreBlock block_;
  SoftmaxState<N>* const state_;
  To* const to_;
  const int64_t to_stride_, to_panel_stride_;
  const float scale_;        // into the unit of scores, where no masks add to them
  const bool scales_later_;  // as their largest is subtracted
  bool by_words_;            // exponentials are made in integers
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  __m512i most_ = _mm512_setzero_si512();  // of their counts
#endif
  // Of each row: what is subtracted, and first its largest scores, then the sums of probabilities.
  alignas(64) float references_[N], vectors_[N * kWidth];
};

}  // namespace xopt::XOPT_ISA
