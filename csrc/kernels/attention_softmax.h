// The softmax of a block of scores as one step of an online softmax: scale, mask, the maximum so far, exponentials.
#pragma once

#include "kernels/attention.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Keys between two looks at the maximum. More make fewer of them; AMX's 32 rows of scores fill L1 at 384.
inline constexpr int64_t kKeyBlock = XOPT_LEVEL >= XOPT_LEVEL_AMX ? 256 : 384;
// The most that a call may ask for.
inline constexpr int64_t kMostKeys = 1024;
inline constexpr float kInfinity = __builtin_inff();

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

// e^x for x of at most 0, and NaN; 0 below 2^-125. A dozen instructions: t = x log2 e is a whole number and a rest
// within a half, of which 2^rest is a polynomial (relative error 1.6e-7).
XOPT_INLINE F exp_of_negative(F x) {
  const F least = set1(-125.0F), t = mul(x, set1(1.44269504F));
  const F inside = max(least, t), n = round_even(inside), rest = sub(inside, n);
  F p = set1(1.326472731e-3F);
  p = fma(p, rest, set1(9.671512991e-3F));
  p = fma(p, rest, set1(5.550733581e-2F));
  p = fma(p, rest, set1(2.402224243e-1F));
  p = fma(p, rest, set1(6.931470037e-1F));
  p = fma(p, rest, set1(1.0F));
  return select_less(t, least, set1(0.0F), scale_exponent(p, n));
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

// Scales and masks a row and returns its largest score. `seen`: columns, the others count as -inf.
template <bool Cut>
float finish_scores(const ScoreBlock& block, int64_t row, KeyRange seen, const float* bias, float scale) {
  const F nothing = set1(-kInfinity), factor = set1(scale);
  const F first = set1(static_cast<float>(seen.begin)), last = set1(static_cast<float>(seen.end - 1));
  F largest = nothing;
  block.for_vectors(row, [&](float* scores, int64_t column) {
    F s = mul(load(scores), factor);
    if (bias != nullptr) s = add(s, load(bias + column));
    if constexpr (Cut) {
      const F number = add(load(kColumnNumbers), set1(static_cast<float>(column)));
      s = select_less(number, first, nothing, s);
      s = select_less(last, number, nothing, s);
    }
    store(scores, s);
    largest = max(s, largest);  // passes over NaN, which the exponentials bring into the sum
  });
  return largest_of(largest);
}

// Takes what the rows found for their largest so far. `references`: what is subtracted from their scores; `factors`:
// what sums made before have to be multiplied by.
template <int64_t N>
void update_largest(SoftmaxState<N>* state, const float* found, float* references, float* factors) {
  const F nothing = set1(-kInfinity), zero = set1(0.0F), one = set1(1.0F);
  for (int64_t row = 0; row < N; row += kWidth) {
    const F before = load(state->largest + row), largest = max(before, load(found + row));
    const F reference = select_less(nothing, largest, largest, zero);  // -inf minus -inf would be NaN
    store(state->largest + row, largest);
    store(references + row, reference);
    store(factors + row, select_less(before, reference, exp_of_negative(sub(before, reference)), one));
  }
}

// Writes exp(score - largest) into `to` (rows `to_stride` apart, zeros up to `padded` columns). All rows are masked
// first and exponentiated then: row by row, each would wait for its own maximum.
template <int64_t N, class Seen, class Bias, class To>
void softmax_step(const ScoreBlock& block, float scale, const Seen& seen, const Bias& bias, SoftmaxState<N>* state,
                  float* factors, To* to, int64_t to_stride, int64_t padded) {
  alignas(64) float found[N], references[N];
  for (int64_t row = 0; row < N; ++row) found[row] = -kInfinity;
  const int64_t whole = round_up(block.columns, kWidth);
  for (int64_t row = 0; row < block.rows; ++row) {
    const KeyRange keys = seen(row);
    found[row] = keys.begin > 0 || keys.end < whole ? finish_scores<true>(block, row, keys, bias(row), scale)
                                                    : finish_scores<false>(block, row, keys, bias(row), scale);
  }
  update_largest(state, found, references, factors);
  for (int64_t row = 0; row < block.rows; ++row, to += to_stride) {
    const F reference = set1(references[row]);
    F sum = set1(0.0F);
    block.for_vectors(row, [&](const float* scores, int64_t column) {
      const F p = exp_of_negative(sub(load(scores), reference));
      sum = add(sum, p);
      store(to + column, p);
    });
    for (int64_t column = whole; column < padded; column += kWidth) store(to + column, set1(0.0F));
    state->sum[row] = state->sum[row] * factors[row] + reduce_add(sum);
  }
}

}  // namespace xopt::XOPT_ISA
