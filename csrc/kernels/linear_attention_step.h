// Linear attention of one step, as in decoding: memory is what it waits for, so the state goes by once, from where it was
// to where it shall be. (To correct, it is read before; what is read twice is a few lines of L1.)
#pragma once

#include "kernels/linear_attention_head.h"
#include "runtime/arena.h"

namespace xopt::XOPT_ISA {

class LinearAttentionStep {
 public:
  LinearAttentionStep(const LinearAttentionCall& call, const LinearAttentionItems& plan)
      : call_(call),
        plan_(plan),
        memory_(static_cast<size_t>(4 * plan.depth + 2 * plan.part_columns) * sizeof(float)),
        key_(memory_.as<float>()),
        query_(key_ + plan.depth),
        kept_(query_ + plan.depth),
        read_by_(kept_ + plan.depth),
        values_(read_by_ + plan.depth),
        outs_(values_ + plan.part_columns) {}

  void compute(int64_t item) {
    const LinearAttentionHead head(call_, plan_, item);
    head.load_key(0, key_);
    head.load_query(0, query_);
    rate_ = head.rate(0);
    const float kept = call_.decays_by_row ? 0.0F : __builtin_expf(head.decay(0));
    for (int64_t row = 0; row < call_.depth; ++row) {
      kept_[row] = call_.decays_by_row ? __builtin_expf(head.decay(0, row)) : kept;
      read_by_[row] = kept_[row] * key_[row];
    }
    for (int64_t i = 0; i < head.columns; i += kWidth) {
      store(values_ + i, load_any(call_.value.data, call_.dtype, head.value_place(0) + i, head.columns - i));
    }
    if (call_.state_by_columns) {
      for (int64_t column = 0; column < head.columns; ++column) compute_column(head, column);
    } else {
      int64_t column = 0;
      for (; column + 4 * kWidth <= head.columns; column += 4 * kWidth) compute_columns<4>(head, column);
      for (; column < head.columns; column += kWidth) compute_columns<1>(head, column);
    }
    for_each_vector(head.columns, [&](int64_t i, int64_t count) {
      store_any(call_.out, call_.out_dtype, head.out_place(0) + i, load(outs_ + i), count);
    });
  }

 private:
  // V vectors of columns, row by row.
  template <int V>
  void compute_columns(const LinearAttentionHead& head, int64_t column) const {
    const int64_t first = head.state_row(0) + column, left = head.columns - column;
    F written[V], out[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) written[v] = out[v] = set1(0.0F);
    for (int64_t row = 0; call_.corrects && row < call_.depth; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const F state = head.state(first + row * call_.value_depth + v * kWidth, left - v * kWidth);
        written[v] = fma(state, set1(read_by_[row]), written[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      written[v] = mul(sub(load(values_ + column + v * kWidth), written[v]), set1(rate_));
    }
    for (int64_t row = 0; row < call_.depth; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int64_t at = first + row * call_.value_depth + v * kWidth;
        const F before = mul(head.state(at, left - v * kWidth), set1(kept_[row]));
        const F state = fma(set1(key_[row]), written[v], before);
        store_first(call_.last_state + at, state, left - v * kWidth);
        out[v] = fma(state, set1(query_[row]), out[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(outs_ + column + v * kWidth, out[v]);
  }

  // One of them, where its rows lie side by side.
  void compute_column(const LinearAttentionHead& head, int64_t column) const {
    const int64_t first = head.state_column(column), depth = call_.depth;
    float read = 0;
    if (call_.corrects) {
      read = sum_of(depth, [&](int64_t i, int64_t count) {
        return mul(head.state(first + i, count), load_first(read_by_ + i, count));
      });
    }
    const F written = set1((values_[column] - read) * rate_);
    outs_[column] = sum_of(depth, [&](int64_t i, int64_t count) {
      const F before = mul(head.state(first + i, count), load_first(kept_ + i, count));
      const F state = fma(load_first(key_ + i, count), written, before);
      store_first(call_.last_state + first + i, state, count);
      return mul(state, load_first(query_ + i, count));
    });
  }

  const LinearAttentionCall& call_;
  const LinearAttentionItems& plan_;
  const Scratch memory_;
  // By rows of the state: also what is kept of it, and that times the key. By columns: values and outputs.
  float *key_, *query_, *kept_, *read_by_, *values_, *outs_;
  float rate_ = 0;
};

}  // namespace xopt::XOPT_ISA
