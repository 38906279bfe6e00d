// A head of values as linear attention sees it, or some of its columns.
#pragma once

#include "kernels/linear_attention.h"
#include "runtime/parallel.h"
#include "tiles/any_dtype.h"
#include "tiles/row_loops.h"
#include "tiles/transpose.h"

namespace xopt::XOPT_ISA {

// The items that threads take: a head x a range of the state's columns each.
struct LinearAttentionItems {
  explicit LinearAttentionItems(const LinearAttentionCall& call) {
    const int64_t heads = call.batch * call.heads, threads = max_threads();
    parts = heads >= 4 * threads || heads % threads == 0 ? 1 : ceil_div(2 * threads, heads);
    part_columns =
        round_up(ceil_div(call.value_depth, minimum(parts, ceil_div(call.value_depth, kLeastColumns))), kLeastColumns);
    parts = ceil_div(call.value_depth, part_columns);
    items = heads * parts;
    depth = round_up(call.depth, kUnits);
  }

  static constexpr int64_t kLeastColumns = 32;
  int64_t parts, part_columns, items;
  int64_t depth;  // padded to whole tiles and vectors
};

struct LinearAttentionHead {
  LinearAttentionHead(const LinearAttentionCall& attention, const LinearAttentionItems& items, int64_t item)
      : call(attention),
        batch(item / items.parts / call.heads),
        head(item / items.parts % call.heads),
        first_column(item % items.parts * items.part_columns),
        columns(minimum(items.part_columns, call.value_depth - first_column)) {}

  // Of the state as callers have it: where a row begins, or a column.
  int64_t state_row(int64_t row) const {
    return ((batch * call.heads + head) * call.depth + row) * call.value_depth + first_column;
  }
  int64_t state_column(int64_t column) const {
    return ((batch * call.heads + head) * call.value_depth + first_column + column) * call.depth;
  }
  // The first `count` values of it from one on, at most a vector; the others are zero.
  XOPT_INLINE F state(int64_t from, int64_t count) const {
    return call.state == nullptr ? set1(0.0F) : load_any(call.state, call.state_dtype, from, count);
  }
  // Of a step's first value, and of its first output.
  int64_t value_place(int64_t step) const { return place(call.value, head, step) + first_column; }
  int64_t out_place(int64_t step) const {
    return ((batch * call.steps + step) * call.heads + head) * call.value_depth + first_column;
  }

  float rate(int64_t step) const { return number(call.rate, step, 0); }
  float decay(int64_t step, int64_t row = 0) const {
    const float given = number(call.decay, step, row);
    return given < kLeastDecay ? kLeastDecay : given;  // and NaN as it is
  }

  // A step's key or query, with zeros up to a whole vector.
  void load_key(int64_t step, float* to) const { load_row(call.key, step, 1.0F, to); }
  void load_query(int64_t step, float* to) const { load_row(call.query, step, call.scale, to); }

  const LinearAttentionCall& call;
  int64_t batch, head, first_column, columns;

 private:
  static constexpr float kLeastDecay = -110.0F;  // forgets all that fp32 holds

  int64_t place(const HeadsView& view, int64_t of_head, int64_t step) const {
    return batch * view.batch_stride + of_head * view.head_stride + step * view.row_stride;
  }
  float number(const StepNumbers& numbers, int64_t step, int64_t row) const {
    const int64_t at = batch * numbers.batch_stride + head * numbers.head_stride + step * numbers.step_stride +
                       row * numbers.row_stride;
    float value = 0;
    store_first(&value, load_any(numbers.data, numbers.dtype, at, 1), 1);
    return value;
  }
  void load_row(const HeadsView& view, int64_t step, float scale, float* to) const {
    const int64_t from = place(view, head / call.group, step);
    for (int64_t i = 0; i < call.depth; i += kWidth) {
      store(to + i, load_any(view.data, call.dtype, from + i, call.depth - i));
    }
    if (call.unit_length) {
      const float squares = sum_of(call.depth, [=](int64_t i, int64_t count) {
        const F x = load_first(to + i, count);
        return mul(x, x);
      });
      scale /= __builtin_sqrtf(squares + call.eps);
    }
    const F factor = set1(scale);
    for (int64_t i = 0; i < call.depth; i += kWidth) store(to + i, mul(load(to + i), factor));
  }
};

}  // namespace xopt::XOPT_ISA
