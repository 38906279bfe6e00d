// The softmax of a block of scores as one step of an online softmax: mask, the maximum so far, scale, exponentials.
#pragma once

#include <type_traits>

#include "kernels/attention.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Keys between two looks at the maximum. More make fewer of them; AMX's 32 rows of scores fill L1 at 384.
inline constexpr int64_t kKeyBlock = XOPT_LEVEL >= XOPT_LEVEL_AMX ? 256 : 384;
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
    const int64_t offset = batch * mask_.batch_stride + head * mask_.head_stride + query * mask_.row_stride;
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

// Scores of rows with a block of keys, in panels of 32 columns. Those beyond `columns` are nobody's.
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
};

// 2^x for x of at most 0, or what rounding leaves above it, and NaN; 0 below 2^-125. x is a whole number and a rest, of
// which 2^rest is a polynomial: of relative error 1.5e-7, or 7.5e-5 where bf16 is enough, whose own is 26 times that.
template <class To>
XOPT_INLINE F exp2_of_negative(F x) {
  const F least = set1(-125.0F), inside = max(least, x), rest = fraction(inside);
  F p;
  if constexpr (std::is_same_v<To, Bf16>) {
    p = set1(7.802452147e-2F);
    p = fma(p, rest, set1(2.260671705e-1F));
    p = fma(p, rest, set1(6.958335042e-1F));
    p = fma(p, rest, set1(9.999251962e-1F));
  } else {
    p = set1(1.877576695e-3F);
    p = fma(p, rest, set1(8.989340626e-3F));
    p = fma(p, rest, set1(5.582631752e-2F));
    p = fma(p, rest, set1(2.401536107e-1F));
    p = fma(p, rest, set1(6.931530833e-1F));
    p = fma(p, rest, set1(9.999999404e-1F));
  }
  return select_less(x, least, set1(0.0F), scale_by_floor(p, inside));
}

XOPT_INLINE float largest_of(F x) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  return _mm512_reduce_max_ps(x);
#else
  alignas(64) float lanes[kWidth];
  store(lanes, x);
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = maximum(lanes[i], lanes[i + half]);
  }
  return lanes[0];
#endif
}

// Masks a row of scores, after scaling them where `Scaled`, and returns the largest, lane by lane. `seen`: columns, the
// others count as -inf. `bias`: nullptr, or what is added.
template <bool Cut, bool Scaled>
F mask_scores(const ScoreBlock& block, int64_t row, KeyRange seen, const float* bias, float scale) {
  const F nothing = set1(-kInfinity), factor = set1(scale);
  const F first = set1(static_cast<float>(seen.begin)), last = set1(static_cast<float>(seen.end - 1));
  F largest = nothing;
  block.for_vectors(row, [&](float* scores, int64_t column) {
    F s = load(scores);
    if constexpr (Scaled) s = mul(s, factor);
    if (bias != nullptr) s = add(s, load(bias + column));
    if constexpr (Cut) {
      const F number = add(load(kColumnNumbers), set1(static_cast<float>(column)));
      s = select_less(number, first, nothing, s);
      s = select_less(last, number, nothing, s);
    }
    if (Cut || Scaled || bias != nullptr) store(scores, s);
    largest = max(s, largest);  // passes over NaN, which the exponentials bring into the sum
  });
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
    const F factor = exp2_of_negative<float>(mul(sub(before, reference), set1(unit)));
    store(factors + row, select_less(before, reference, factor, one));
  }
}

// A block of scores on its way to probabilities. The instruction that subtracts the largest scales, too, unless masks
// add to scores, which comes in between.
template <int64_t N, class To>
class SoftmaxStep {
 public:
  // Probabilities go into `to`, rows `to_stride` apart, with zeros up to `padded` columns.
  SoftmaxStep(const AttentionCall& call, const ScoreBlock& block, SoftmaxState<N>* state, To* to, int64_t to_stride,
              int64_t padded)
      : call_(call),
        block_(block),
        state_(state),
        to_(to),
        to_stride_(to_stride),
        padded_(padded),
        scale_(adds_to_scores(call) ? call.scale : call.scale * kLog2E),
        scales_later_(!adds_to_scores(call) && scale_ > 0) {}

  // Masks rows and finds their largest scores. `factors`: what sums made before have to be multiplied by.
  template <class Seen, class Bias>
  void find_largest(const Seen& seen, const Bias& bias, float* factors) {
    for (int64_t row = 0; row < block_.rows; ++row) {
      const KeyRange keys = seen(row);
      const bool cut = keys.begin > 0 || keys.end < round_up(block_.columns, kWidth);
      const auto mask = scales_later_ ? cut ? mask_scores<true, false> : mask_scores<false, false>
                        : cut         ? mask_scores<true, true>
                                      : mask_scores<false, true>;
      store(vectors_ + row * kWidth, mask(block_, row, keys, bias(row), scale_));
    }
    take_largest(factors);
  }

  // Whether scores need not be scaled to be looked at.
  bool scales_later() const { return scales_later_; }

  // Where nothing masks scores: the largest of a panel's rows [begin, end). Panel by panel, each row once.
  XOPT_INLINE void look_at(int64_t panel, int64_t begin, int64_t end) {
    const float* scores = block_.scores + panel * block_.panel_stride + begin * block_.row_stride;
    const int64_t count = minimum(kPanelColumns, block_.columns - panel * kPanelColumns);
    for (int64_t row = begin; row < end; ++row, scores += block_.row_stride) {
      F largest = panel == 0 ? set1(-kInfinity) : load(vectors_ + row * kWidth);
      for (int64_t i = 0; i < count; i += kWidth) largest = max(load(scores + i), largest);
      store(vectors_ + row * kWidth, largest);
    }
  }

  // Of rows that have all been looked at.
  void take_largest(float* factors) {
    alignas(64) float found[N];
    for (int64_t row = 0; row < N; ++row) found[row] = -kInfinity;
    for (int64_t row = 0; row < block_.rows; ++row) {
      found[row] = largest_of(load(vectors_ + row * kWidth)) * later_scale();
      store(vectors_ + row * kWidth, set1(0.0F));
    }
    update_largest(state_, score_unit(call_), found, references_, factors);
    for (int64_t row = 0; row < block_.rows; ++row) state_->sum[row] *= factors[row];
  }

  // The probabilities of a panel of columns, in which there are scores.
  void exponentiate(int64_t panel) {
    if (adds_to_scores(call_)) {
      exponentiate_rows<true>(panel);
    } else {
      exponentiate_rows<false>(panel);
    }
  }

  // When all panels are done.
  void add_sums() {
    for (int64_t row = 0; row < block_.rows; ++row) state_->sum[row] += reduce_add(load(vectors_ + row * kWidth));
  }

 private:
  // What scores are yet to be scaled by.
  float later_scale() const { return scales_later_ ? scale_ : 1.0F; }

  template <bool Adds>
  void exponentiate_rows(int64_t panel) {
    const int64_t column = panel * kPanelColumns, left = block_.columns - column;
    const float* scores = block_.scores + panel * block_.panel_stride;
    To* to = to_ + column;
    const F scale = set1(Adds ? kLog2E : later_scale());
    for (int64_t row = 0; row < block_.rows; ++row, scores += block_.row_stride, to += to_stride_) {
      const F reference = set1(references_[row]), subtracted = set1(-references_[row]);
      const auto probability = [&](int64_t i) {
        const F score = load(scores + i);
        return exp2_of_negative<To>(Adds ? mul(sub(score, reference), scale) : fma(score, scale, subtracted));
      };
      F sum = load(vectors_ + row * kWidth);
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
        for (int64_t i = round_up(left, kWidth); i < padded_ - column; i += kWidth) store(to + i, set1(0.0F));
      }
      store(vectors_ + row * kWidth, sum);
    }
  }

  const AttentionCall& call_;
  const ScoreBlock block_;
  SoftmaxState<N>* const state_;
  To* const to_;
  const int64_t to_stride_, padded_;
  const float scale_;        // into the unit of scores, where no masks add to them
  const bool scales_later_;  // as their largest is subtracted
  // Of each row: what is subtracted, and first its largest scores, then the sums of probabilities.
  alignas(64) float references_[N], vectors_[N * kWidth];
};

}  // namespace xopt::XOPT_ISA
