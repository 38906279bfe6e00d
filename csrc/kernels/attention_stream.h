// Attention of a few rows, as in decoding: one pass over keys and values, where they are.
//
//   item          a head of keys x 512 keys unless tuned, whichever thread takes it
//    block of keys  scores, online softmax, and sums of values, of all rows at once
//   the last item of a head to be done puts the results of its parts together, always in the same order
//
// Memory is what it should wait for: a key is loaded once for all rows, and sums over lanes are made four at a time.
#pragma once

#include "kernels/attention_head.h"
#include "runtime/arena.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kFewRows = 8;

// The sums over the lanes of four vectors.
XOPT_INLINE void reduce_four(const F (&x)[4], float* to) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  const F ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const F cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const F abcd = add(_mm512_castpd_ps(low), _mm512_castpd_ps(high));  // the four, in each quarter
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  for (int i = 0; i < 4; ++i) to[i] = reduce_add(x[i]);
#endif
}

// `depth`: of the keys; the query has zeros up to a whole vector.
template <class K>
XOPT_INLINE void dot_four(const float* query, const K* const (&keys)[4], int64_t depth, float* to) {
  F sums[4] = {set1(0.0F), set1(0.0F), set1(0.0F), set1(0.0F)};
  int64_t i = 0;
  for (; i + kWidth <= depth; i += kWidth) {
    const F q = load(query + i);
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) sums[key] = fma(q, load(keys[key] + i), sums[key]);
  }
  if (i < depth) {
    const F q = load(query + i);
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) sums[key] = fma(q, load_first(keys[key] + i, depth - i), sums[key]);
  }
  reduce_four(sums, to);
}

// What the items have in common. Each leaves its sums and state here.
struct StreamPlan {
  explicit StreamPlan(const AttentionCall& call) {
    rows = call.queries * call.group;
    depth = round_up(call.depth, kPanelColumns);
    value_depth = round_up(call.value_depth, kPanelColumns);
    keys = keys_of_queries(call, 0, call.queries - 1);
    if (call.tuning.chunk_panels > 0) part_keys = call.tuning.chunk_panels * kPanelColumns;
    parts = maximum<int64_t>(1, ceil_div(keys.end - keys.begin, part_keys));
    heads = call.batch * call.heads;
  }

  KeyRange keys_of(int64_t part) const {
    const int64_t begin = keys.begin + part * part_keys;
    return {begin, minimum(begin + part_keys, keys.end)};
  }

  int64_t rows, depth, value_depth;  // depths with the padding of copies
  KeyRange keys;                     // that any row sees
  int64_t part_keys = 512, parts, heads;
};

struct StreamState : SoftmaxState<16> {
  int32_t parts_done;  // of the head, in the state of its first part
};

template <class T>
class AttentionStream {
  static constexpr bool kConverts = sizeof(T) != sizeof(float);
  static constexpr int kRowsAtOnce = XOPT_LEVEL >= XOPT_LEVEL_AVX512 ? 4 : 2;  // whose sums stay in registers

 public:
  static void run(const AttentionCall& call) {
    const StreamPlan plan(call);
    const int64_t items = plan.heads * plan.parts;
    const Scratch sums(static_cast<size_t>(items * plan.rows * plan.value_depth) * sizeof(float));
    const Scratch states(static_cast<size_t>(items) * sizeof(StreamState));
    for (int64_t item = 0; item < items; ++item) {
      states.as<StreamState>()[item].clear();
      states.as<StreamState>()[item].parts_done = 0;
    }
    for_each_item(items, xopt::max_threads(), [&] {
      return [thread = AttentionStream(call, plan, sums.as<float>(), states.as<StreamState>())](int64_t item) mutable {
        thread.compute(item);
      };
    });
  }

 private:
  AttentionStream(const AttentionCall& call, const StreamPlan& plan, float* sums, StreamState* states)
      : call_(call), plan_(plan), mask_(call.mask), all_sums_(sums), all_states_(states) {}

  void compute(int64_t item) {
    const int64_t index = item / plan_.parts;
    const AttentionHead<T> head{call_, index / call_.heads, index % call_.heads};
    sums_ = all_sums_ + item * plan_.rows * plan_.value_depth;
    state_ = all_states_ + item;
    const Scratch queries(static_cast<size_t>(plan_.rows * plan_.depth) * sizeof(float));
    const Scratch scores(static_cast<size_t>(plan_.rows * kKeyBlock) * sizeof(float));
    const Scratch converted(static_cast<size_t>(4 * plan_.depth) * sizeof(float));
    queries_ = queries.as<float>();
    scores_ = scores.as<float>();
    converted_ = converted.as<float>();
    find_places(call_, 0, plan_.rows, places_);
    for (int64_t row = 0; row < plan_.rows; ++row)
      convert_key(head.queries(places_[row]), queries_ + row * plan_.depth);
    for (int64_t i = 0; i < plan_.rows * plan_.value_depth; ++i) sums_[i] = 0;
    const KeyRange keys = plan_.keys_of(item % plan_.parts);
    for (int64_t key = keys.begin; key < keys.end; key += kKeyBlock) {
      step(head, key, minimum(kKeyBlock, keys.end - key));
    }
    const int64_t first = index * plan_.parts;
    if (__atomic_add_fetch(&all_states_[first].parts_done, 1, __ATOMIC_ACQ_REL) == plan_.parts) finish(head, first);
  }

  void convert_key(const T* from, float* to) const {
    if (call_.depth > 0) convert_run<float>(from, call_.depth, to);
    for (int64_t i = call_.depth; i < plan_.depth; ++i) to[i] = 0;
  }

  void step(const AttentionHead<T>& head, int64_t key, int64_t count) {
    for (int64_t i = 0; i < count; i += 4) {
      const T* keys[4];
      for (int64_t j = 0; j < 4; ++j) keys[j] = head.keys(key + minimum(i + j, count - 1));
      if (kConverts && plan_.rows > 1) {
        const float* copies[4];
        for (int64_t j = 0; j < 4; ++j) {
          convert_key(keys[j], converted_ + j * plan_.depth);
          copies[j] = converted_ + j * plan_.depth;
        }
        dot_rows(copies, plan_.depth, i);
      } else {
        dot_rows(keys, call_.depth, i);
      }
    }
    alignas(64) float factors[16];
    const ScoreBlock scores{scores_, kKeyBlock, kPanelColumns, plan_.rows, count};
    SoftmaxStep<16, float> softmax(call_, scores, state_, scores_, kKeyBlock, kPanelColumns, false);
    head.mask({0, plan_.rows}, places_, key, count, &mask_, &softmax);
    softmax.take_largest(factors);
    for (int64_t panel = 0; panel * kPanelColumns < count; ++panel) softmax.exponentiate(panel, 0, plan_.rows);
    softmax.add_sums();
    int64_t row = 0;
    for (; row + kRowsAtOnce <= plan_.rows; row += kRowsAtOnce) add_values<kRowsAtOnce>(head, key, count, row, factors);
    for (; row < plan_.rows; ++row) add_values<1>(head, key, count, row, factors);
  }

  template <class K>
  void dot_rows(const K* const (&keys)[4], int64_t depth, int64_t column) const {
    for (int64_t row = 0; row < plan_.rows; ++row) {
      dot_four(queries_ + row * plan_.depth, keys, depth, scores_ + row * kKeyBlock + column);
    }
  }

  template <int R>
  void add_values(const AttentionHead<T>& head, int64_t key, int64_t count, int64_t row, const float* factors) const {
    int64_t column = 0;
    for (; column + 4 * kWidth <= call_.value_depth; column += 4 * kWidth) {
      add_columns<R, 4>(head, key, count, row, factors, column);
    }
    for (; column < call_.value_depth; column += kWidth) add_columns<R, 1>(head, key, count, row, factors, column);
  }

  // R rows x N vectors of columns, which stay in registers over the keys.
  template <int R, int N>
  void add_columns(const AttentionHead<T>& head, int64_t key, int64_t count, int64_t row, const float* factors,
                   int64_t column) const {
    F total[R][N];
    float* sums = sums_ + row * plan_.value_depth + column;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        total[r][v] = mul(load(sums + r * plan_.value_depth + v * kWidth), set1(factors[row + r]));
      }
    }
    const T* values = head.values(key) + column;
    const float* probabilities = scores_ + row * kKeyBlock;
    const int64_t left = call_.value_depth - column;
    for (int64_t i = 0; i < count; ++i, values += call_.value.row_stride) {
      F value[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) value[v] = N == 1 ? load_first(values, left) : load(values + v * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const F p = set1(probabilities[r * kKeyBlock + i]);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) total[r][v] = fma(p, value[v], total[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) store(sums + r * plan_.value_depth + v * kWidth, total[r][v]);
    }
  }

  // Adds the parts of a head up, scaled to the largest score of them all.
  void finish(const AttentionHead<T>& head, int64_t first) {
    StreamState* total = all_states_ + first;
    float* sums = all_sums_ + first * plan_.rows * plan_.value_depth;
    const float unit = score_unit(call_);
    for (int64_t part = 1; part < plan_.parts; ++part) {
      const StreamState& state = all_states_[first + part];
      const float* added = sums + part * plan_.rows * plan_.value_depth;
      alignas(64) float references[16], before[16], after[16];
      SoftmaxState<16> other = state;
      update_largest(total, unit, state.largest, references, before);
      update_largest(&other, unit, total->largest, references, after);
      for (int64_t row = 0; row < plan_.rows; ++row) {
        total->sum[row] = total->sum[row] * before[row] + other.sum[row] * after[row];
        for (int64_t i = row * plan_.value_depth; i < (row + 1) * plan_.value_depth; i += kWidth) {
          store(sums + i, fma(load(sums + i), set1(before[row]), mul(load(added + i), set1(after[row]))));
        }
      }
    }
    for (int64_t row = 0; row < plan_.rows; ++row) {
      const float inverse = head.inverse_of(places_[row], total->sum[row], total->largest[row]);
      write_scaled(sums + row * plan_.value_depth, inverse, call_.value_depth, head.out(places_[row]));
    }
  }

  const AttentionCall& call_;
  const StreamPlan& plan_;
  MaskRow mask_;
  RowPlace places_[kFewRows];
  float* const all_sums_;          // [head][part][row][value depth]
  StreamState* const all_states_;  // [head][part]
  float* sums_ = nullptr;          // of the part
  StreamState* state_ = nullptr;   // of the part
  float *queries_ = nullptr, *scores_ = nullptr, *converted_ = nullptr;
};

// Computes attention of nothing and of a few rows, for which blocks would be too much; false for any other.
template <class T>
bool few_rows_done(const AttentionCall& call) {
  const int64_t heads = call.batch * call.heads, rows = call.queries * call.group;
  if (heads == 0 || rows == 0 || call.value_depth == 0) return true;
  if (rows > kFewRows) return false;
  AttentionStream<T>::run(call);
  return true;
}

}  // namespace xopt::XOPT_ISA
