// The gated delta rule. See delta_rule.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Step by step each value of the state would be loaded twice and stored once for three multiplications. So it is done by
// chunks of 16 steps: what the state at a chunk's beginning has for all their keys and queries is one product; how steps
// correct each other, a small triangular system of numbers that are the same for all columns; what they write into the
// state, a second product. Nothing is inverted: of a chunk, step i needs the corrections of the steps before it.
//
//   item        a head of values x a range of the state's columns, whichever thread takes it
//    chunk       keys, queries, what they have in common with each other
//     state       sums = (keys, queries) * state; corrections and outputs; state = decay * state + keys^T * corrections
//
// Columns depend on nothing but themselves, so however they are shared, results are the same.
#include "kernels/delta_rule.h"

#include "kernels/each_item.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/row_loops.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kChunk = 16;                                        // steps; numbers between them are rows of 16
constexpr int64_t kLeastColumns = 32;                                 // of an item
constexpr int kRowsAtOnce = XOPT_LEVEL >= XOPT_LEVEL_AVX512 ? 8 : 4;  // whose sums stay in registers, two vectors each
constexpr float kLeastDecay = -110.0F;                                // forgets all that fp32 holds

struct Matrix {
  float* data;
  int64_t stride;
};

// R rows x V vectors of sums = factors * sums + a * b, over k columns of a. nullptr: sums begin with zero.
template <int R, int V>
XOPT_INLINE void multiply_rows(Matrix a, Matrix b, int64_t k, const float* factors, Matrix sums) {
  F total[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      total[r][v] =
          factors == nullptr ? set1(0.0F) : mul(load(sums.data + r * sums.stride + v * kWidth), set1(factors[r]));
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    F row[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) row[v] = load(b.data + i * b.stride + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F factor = set1(a.data[r * a.stride + i]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) total[r][v] = fma(factor, row[v], total[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sums.data + r * sums.stride + v * kWidth, total[r][v]);
  }
}

template <int V>
void multiply_columns(Matrix a, int64_t rows, Matrix b, int64_t k, const float* factors, Matrix sums) {
  const auto from = [&](int64_t row) { return factors == nullptr ? nullptr : factors + row; };
  const auto below = [](Matrix m, int64_t row) { return Matrix{m.data + row * m.stride, m.stride}; };
  int64_t row = 0;
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce) {
    multiply_rows<kRowsAtOnce, V>(below(a, row), b, k, from(row), below(sums, row));
  }
  for (; row + 2 <= rows; row += 2) multiply_rows<2, V>(below(a, row), b, k, from(row), below(sums, row));
  if (row < rows) multiply_rows<1, V>(below(a, row), b, k, from(row), below(sums, row));
}

// `columns`: a multiple of kWidth.
void multiply(Matrix a, int64_t rows, Matrix b, int64_t k, int64_t columns, const float* factors, Matrix sums) {
  int64_t column = 0;
  for (; column + 2 * kWidth <= columns; column += 2 * kWidth) {
    multiply_columns<2>(a, rows, {b.data + column, b.stride}, k, factors, {sums.data + column, sums.stride});
  }
  for (; column < columns; column += kWidth) {
    multiply_columns<1>(a, rows, {b.data + column, b.stride}, k, factors, {sums.data + column, sums.stride});
  }
}

struct Plan {
  explicit Plan(const DeltaRuleCall& call) {
    const int64_t heads = call.batch * call.heads, threads = max_threads();
    parts = heads >= 4 * threads || heads % threads == 0 ? 1 : ceil_div(2 * threads, heads);
    part_columns =
        round_up(ceil_div(call.value_depth, minimum(parts, ceil_div(call.value_depth, kLeastColumns))), kLeastColumns);
    parts = ceil_div(call.value_depth, part_columns);
    items = heads * parts;
    depth = round_up(call.depth, kWidth);
  }

  int64_t parts, part_columns, items;
  int64_t depth;  // with the padding of rows
};

class DeltaRuleThread {
 public:
  DeltaRuleThread(const DeltaRuleCall& call, const Plan& plan)
      : call_(call),
        plan_(plan),
        chunk_(call.decays_by_row ? 1 : kChunk),
        memory_(static_cast<size_t>(plan.part_columns * (call.depth + 3 * kChunk) + plan.depth * (3 * kChunk + 1) +
                                    2 * kChunk * kChunk) *
                sizeof(float)) {
    float* at = memory_.as<float>();
    const auto take = [&](int64_t rows, int64_t stride) {
      const Matrix taken{at, stride};
      at += rows * stride;
      return taken;
    };
    state_ = take(call.depth, plan.part_columns);
    sums_ = take(2 * kChunk, plan.part_columns);
    corrections_ = take(kChunk, plan.part_columns);
    rows_ = take(2 * kChunk, plan.depth);
    keys_ = take(plan.depth, kChunk);
    among_ = take(2 * kChunk, kChunk);
    kept_ = at;
  }

  void compute(int64_t item) {
    const int64_t index = item / plan_.parts;
    batch_ = index / call_.heads;
    head_ = index % call_.heads;
    first_column_ = item % plan_.parts * plan_.part_columns;
    count_ = minimum(plan_.part_columns, call_.value_depth - first_column_);
    columns_ = round_up(count_, kWidth);
    begin_state();
    for (int64_t step = 0; step < call_.steps; step += chunk_) {
      steps_ = minimum(chunk_, call_.steps - step);
      load_rows(step);
      load_numbers(step);
      multiply(rows_, 2 * steps_, state_, call_.depth, columns_, nullptr, sums_);
      int64_t column = 0;
      for (; column + 4 * kWidth <= columns_; column += 4 * kWidth) correct<4>(step, column);
      for (; column < columns_; column += kWidth) correct<1>(step, column);
      multiply(keys_, call_.depth, corrections_, steps_, columns_, kept_, state_);
    }
    end_state();
  }

 private:
  int64_t state_row(int64_t row) const {
    return ((batch_ * call_.heads + head_) * call_.depth + row) * call_.value_depth + first_column_;
  }
  void begin_state() const {
    for (int64_t row = 0; row < call_.depth; ++row) {
      float* to = state_.data + row * state_.stride;
      const int64_t from = state_row(row);
      for (int64_t i = 0; i < columns_; i += kWidth) {
        const F nothing = set1(0.0F);
        store(to + i,
              call_.state == nullptr ? nothing : load_any(call_.state, call_.state_dtype, from + i, count_ - i));
      }
    }
  }
  void end_state() const {
    for (int64_t row = 0; row < call_.depth; ++row) {
      const float* from = state_.data + row * state_.stride;
      float* to = call_.last_state + state_row(row);
      for_each_vector(count_, [&](int64_t i, int64_t count) { store_first(to + i, load(from + i), count); });
    }
  }

  int64_t place(const HeadsView& view, int64_t head, int64_t step) const {
    return batch_ * view.batch_stride + head * view.head_stride + step * view.row_stride;
  }
  float number(const StepNumbers& numbers, int64_t step, int64_t row = 0) const {
    const int64_t at = batch_ * numbers.batch_stride + head_ * numbers.head_stride + step * numbers.step_stride +
                       row * numbers.row_stride;
    alignas(64) float values[kWidth];
    store(values, load_any(numbers.data, numbers.dtype, at, 1));
    return values[0];
  }
  float decay(int64_t step, int64_t row = 0) const {
    const float given = number(call_.decay, step, row);
    return given < kLeastDecay ? kLeastDecay : given;  // and NaN as it is
  }

  // Keys and queries of a chunk as floats: rows, below each other; keys as columns, too.
  void load_rows(int64_t step) const {
    for (int64_t i = 0; i < steps_; ++i) {
      float* key = rows_.data + i * rows_.stride;
      load_row(call_.key, step + i, 1.0F, key);
      load_row(call_.query, step + i, call_.scale, rows_.data + (steps_ + i) * rows_.stride);
      for (int64_t row = 0; row < call_.depth; ++row) keys_.data[row * kChunk + i] = key[row];
    }
    for (int64_t i = steps_; i < kChunk; ++i) {
      for (int64_t row = 0; row < call_.depth; ++row) keys_.data[row * kChunk + i] = 0;
    }
  }
  void load_row(const HeadsView& view, int64_t step, float scale, float* to) const {
    const int64_t from = place(view, head_ / call_.group, step);
    for (int64_t i = 0; i < call_.depth; i += kWidth) {
      store(to + i, load_any(view.data, call_.dtype, from + i, call_.depth - i));
    }
    if (call_.unit_length) {
      const float squares = sum_of(call_.depth, [=](int64_t i, int64_t count) {
        const F x = load_first(to + i, count);
        return mul(x, x);
      });
      scale /= __builtin_sqrtf(squares + call_.eps);
    }
    const F factor = set1(scale);
    for (int64_t i = 0; i < call_.depth; i += kWidth) store(to + i, mul(load(to + i), factor));
  }

  // What keys and queries have in common with the chunk's keys, each less by the decay between the two, and the decays
  // since the chunk's beginning and until its end.
  void load_numbers(int64_t step) {
    multiply(rows_, 2 * steps_, keys_, call_.depth, kChunk, nullptr, among_);
    for (int64_t i = 0; i < steps_; ++i) rates_[i] = number(call_.rate, step + i);
    if (call_.decays_by_row) return load_row_decays(step);
    alignas(64) float until[kChunk] = {};
    float total = 0;
    for (int64_t i = 0; i < steps_; ++i) until[i] = total += decay(step + i);
    for (int64_t i = 0; i < kChunk; i += kWidth) {
      store(since_ + i, exp(load(until + i)));
      store(ahead_ + i, exp(sub(set1(total), load(until + i))));
    }
    for (int64_t i = 0; i < steps_; ++i) {
      float *keys = among_.data + i * kChunk, *queries = among_.data + (steps_ + i) * kChunk;
      for (int64_t j = 0; j < kChunk; j += kWidth) {
        const F factor = exp(sub(set1(until[i]), load(until + j)));  // of later steps, nobody asks
        store(keys + j, mul(load(keys + j), factor));
        store(queries + j, mul(load(queries + j), factor));
      }
    }
    for (int64_t row = 0; row < call_.depth; ++row) kept_[row] = since_[steps_ - 1];
  }
  // Of a chunk of one step: rows of the state decay before they are read.
  void load_row_decays(int64_t step) {
    since_[0] = ahead_[0] = 1.0F;
    float *key = rows_.data, *query = rows_.data + rows_.stride;
    for (int64_t row = 0; row < call_.depth; ++row) {
      kept_[row] = __builtin_expf(decay(step, row));
      key[row] *= kept_[row];
      query[row] *= kept_[row];
    }
  }

  // V vectors of columns: what each step corrects, and gives. Corrections take the place of what was read.
  template <int V>
  XOPT_INLINE void correct(int64_t step, int64_t column) const {
    for (int64_t i = 0; i < steps_; ++i) {
      const float *keys = among_.data + i * kChunk, *queries = among_.data + (steps_ + i) * kChunk;
      float* read_row = sums_.data + i * sums_.stride + column;
      const float* out_row = sums_.data + (steps_ + i) * sums_.stride + column;
      F read[V], out[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        read[v] = mul(load(read_row + v * kWidth), set1(since_[i]));
        out[v] = mul(load(out_row + v * kWidth), set1(since_[i]));
      }
      for (int64_t j = 0; j < i; ++j) {
        const float* correction = sums_.data + j * sums_.stride + column;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          read[v] = fma(set1(keys[j]), load(correction + v * kWidth), read[v]);
          out[v] = fma(set1(queries[j]), load(correction + v * kWidth), out[v]);
        }
      }
      const int64_t from = place(call_.value, head_, step + i) + first_column_ + column;
      const int64_t to = ((batch_ * call_.steps + step + i) * call_.heads + head_) * call_.value_depth + first_column_;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int64_t left = count_ - column - v * kWidth;
        const F value = load_any(call_.value.data, call_.dtype, from + v * kWidth, left);
        const F correction = mul(sub(value, read[v]), set1(rates_[i]));
        store(read_row + v * kWidth, correction);
        store(corrections_.data + i * corrections_.stride + column + v * kWidth, mul(correction, set1(ahead_[i])));
        store_any(call_.out, call_.dtype, to + column + v * kWidth, fma(set1(queries[i]), correction, out[v]), left);
      }
    }
  }

  const DeltaRuleCall& call_;
  const Plan& plan_;
  const int64_t chunk_;
  const Scratch memory_;
  Matrix state_, sums_, corrections_;  // [depth], [keys, then queries], [step], by columns
  Matrix rows_, keys_, among_;         // [keys, then queries][depth], [depth][step], [keys, then queries][step]
  float* kept_;                        // [depth]: of the state's rows, until the chunk's end
  int64_t batch_ = 0, head_ = 0, first_column_ = 0, count_ = 0, columns_ = 0;  // columns_: with padding
  int64_t steps_ = 0;                                                          // of the chunk at hand
  // Of a step: the decay since the chunk's beginning and until its end, and its rate.
  alignas(64) float since_[kChunk], ahead_[kChunk], rates_[kChunk];
};

void delta_rule(const DeltaRuleCall& call) {
  const Plan plan(call);
  for_each_item(plan.items, max_threads(),
                [&] { return [thread = DeltaRuleThread(call, plan)](int64_t item) mutable { thread.compute(item); }; });
}

}  // namespace

XOPT_REGISTER_KERNEL(delta_rule, f32, delta_rule);

}  // namespace xopt::XOPT_ISA
