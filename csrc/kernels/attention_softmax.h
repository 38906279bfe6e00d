// The softmax of a block of scores as one step of an online softmax: scale, mask, the maximum so far, exponentials.
#pragma once

#include "kernels/attention.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kKeyBlock = 256;  // keys between two looks at the maximum; their scores stay in L1
inline constexpr float kInfinity = __builtin_inff();

alignas(64) inline constexpr float kColumnNumbers[kPanelColumns] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                                    11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                                    22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

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
  alignas(64) float bias_[kKeyBlock];
};

// A row of scores: panels of 32, `panel_stride` apart.
struct ScoreRow {
  float* scores;
  int64_t panel_stride, panels;
  KeyRange seen;      // columns; the others count as -inf
  const float* bias;  // panels * 32 values, or nullptr
};

// Of the keys so far. The largest score is -inf, and the sum 0, as long as none was seen.
struct SoftmaxState {
  float largest, sum;
};

XOPT_INLINE float largest_of(F x) {
  alignas(64) float lanes[kWidth];
  store(lanes, x);
  for (int64_t half = kWidth / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = maximum(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

XOPT_INLINE float exp_of(float x) {
  float lanes[kWidth];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

template <bool Cut>
float finish_scores(const ScoreRow& row, float scale) {
  const F nothing = set1(-kInfinity), factor = set1(scale);
  const F first = set1(static_cast<float>(row.seen.begin)), last = set1(static_cast<float>(row.seen.end - 1));
  F largest = nothing;
  for (int64_t panel = 0; panel < row.panels; ++panel) {
    float* scores = row.scores + panel * row.panel_stride;
    for (int64_t i = 0; i < kPanelColumns; i += kWidth) {
      F s = mul(load(scores + i), factor);
      if (row.bias != nullptr) s = add(s, load(row.bias + panel * kPanelColumns + i));
      if constexpr (Cut) {
        const F column = add(load(kColumnNumbers + i), set1(static_cast<float>(panel * kPanelColumns)));
        s = select_less(column, first, nothing, s);
        s = select_less(last, column, nothing, s);
      }
      store(scores + i, s);
      largest = max(s, largest);  // passes over NaN, which the exponentials bring into the sum
    }
  }
  return largest_of(largest);
}

// Writes exp(score - largest) into `to` (panels * 32 values) and returns what sums made before have to be multiplied by.
template <class To>
float softmax_step(const ScoreRow& row, float scale, SoftmaxState* state, To* to) {
  const bool cut = row.seen.begin > 0 || row.seen.end < row.panels * kPanelColumns;
  const float found = cut ? finish_scores<true>(row, scale) : finish_scores<false>(row, scale);
  const float largest = maximum(state->largest, found);
  const float reference = largest == -kInfinity ? 0.0F : largest;  // -inf minus -inf would be NaN
  const float factor = state->largest == reference ? 1.0F : exp_of(state->largest - reference);
  F sum = set1(0.0F);
  for (int64_t panel = 0; panel < row.panels; ++panel) {
    const float* scores = row.scores + panel * row.panel_stride;
    for (int64_t i = 0; i < kPanelColumns; i += kWidth) {
      const F p = exp(sub(load(scores + i), set1(reference)));
      sum = add(sum, p);
      store(to + panel * kPanelColumns + i, p);
    }
  }
  state->largest = largest;
  state->sum = state->sum * factor + reduce_add(sum);
  return factor;
}

}  // namespace xopt::XOPT_ISA
