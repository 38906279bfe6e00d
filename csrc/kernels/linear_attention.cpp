// Linear attention. See linear_attention.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Step by step each value of the state would be loaded twice and stored once for three multiplications. So it is done by
// chunks of 16 steps: what the state at a chunk's beginning has for all their keys and queries is one product; how steps
// correct each other, a small triangular system of numbers that are the same for all columns; what they write into the
// state, a second product. Nothing is inverted: of a chunk, step i needs what the steps before it write.
//
//   item        a head of values x a range of the state's columns, whichever thread takes it
//    chunk       keys, queries, what they have in common with each other
//     state       sums = (keys, queries) * state; what is written, and outputs; state = decay * state + keys^T * written
//
// Columns depend on nothing but themselves, so however they are shared, results are the same.
#include "kernels/linear_attention.h"

#include "kernels/each_item.h"
#include "kernels/linear_attention_head.h"
#include "kernels/linear_attention_step.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/copy.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kChunk = 16;                                        // steps; numbers between them are rows of 16
constexpr int kRowsAtOnce = XOPT_LEVEL >= XOPT_LEVEL_AVX512 ? 8 : 4;  // whose sums stay in registers, two vectors each

struct Matrix {
  float* data;
  int64_t stride;
};
// Its rows from one on.
XOPT_INLINE Matrix below(Matrix m, int64_t row) { return {m.data + row * m.stride, m.stride}; }

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

class LinearAttentionThread {
 public:
  LinearAttentionThread(const LinearAttentionCall& call, const LinearAttentionItems& plan)
      : call_(call),
        plan_(plan),
        chunk_(call.decays_by_row ? 1 : kChunk),
        memory_(static_cast<size_t>((plan.part_columns + kChunk) * (plan.depth + 3 * kChunk) +
                                    plan.depth * (3 * kChunk + 1)) *
                sizeof(float)) {
    float* at = memory_.as<float>();
    const auto take = [&](int64_t rows, int64_t stride) {
      const Matrix taken{at, stride};
      at += rows * stride;
      return taken;
    };
    state_ = take(plan.depth, plan.part_columns);
    sums_ = take(2 * kChunk, plan.part_columns);
    written_ = take(kChunk, plan.part_columns);
    rows_ = take(2 * kChunk, plan.depth);
    keys_ = take(plan.depth, kChunk);
    staged_ = take(kUnits, plan.depth);
    among_ = take(2 * kChunk, kChunk);
    kept_ = at;
  }

  void compute(int64_t item) {
    const LinearAttentionHead head(call_, plan_, item);
    head_ = &head;
    count_ = head.columns;
    columns_ = round_up(count_, kWidth);
    call_.state_by_columns ? begin_columns() : begin_rows();
    for (int64_t step = 0; step < call_.steps; step += chunk_) {
      steps_ = minimum(chunk_, call_.steps - step);
      load_rows(step);
      load_numbers(step);
      multiply_rows_with(state_, columns_, sums_);
      call_.corrects ? write<true>(step) : write<false>(step);
      multiply(keys_, call_.depth, written_, steps_, columns_, kept_, state_);
    }
    call_.state_by_columns ? end_columns() : end_rows();
  }

 private:
  void load_state(int64_t from, int64_t count, float* to) const {
    for (int64_t i = 0; i < count; i += kWidth) store(to + i, head_->state(from + i, count - i));
  }
  void begin_rows() const {
    for (int64_t row = 0; row < call_.depth; ++row) load_state(head_->state_row(row), count_, below(state_, row).data);
  }
  void end_rows() const {
    for (int64_t row = 0; row < call_.depth; ++row) {
      const float* from = below(state_, row).data;
      float* to = call_.last_state + head_->state_row(row);
      for_each_vector(count_, [&](int64_t i, int64_t count) { store_first(to + i, load(from + i), count); });
    }
  }
  // By tiles of 16 columns and rows.
  void begin_columns() const {
    alignas(64) float tile[kUnits * kUnits];
    for (int64_t column = 0; column < count_; column += kUnits) {
      for (int64_t i = 0; i < minimum(kUnits, count_ - column); ++i) {
        load_state(head_->state_column(column + i), call_.depth, below(staged_, i).data);
      }
      for (int64_t row = 0; row < call_.depth; row += kUnits) {
        transpose(staged_.data + row, staged_.stride, tile);
        for (int64_t i = 0; i < kUnits; ++i) copy_bytes(tile + i * kUnits, 64, below(state_, row + i).data + column);
      }
    }
  }
  void end_columns() const {
    alignas(64) float tile[kUnits * kUnits];
    for (int64_t row = 0; row < call_.depth; row += kUnits) {
      const int64_t rows = minimum(kUnits, call_.depth - row);
      for (int64_t column = 0; column < count_; column += kUnits) {
        transpose(below(state_, row).data + column, state_.stride, tile);
        for (int64_t i = 0; i < minimum(kUnits, count_ - column); ++i) {
          copy_bytes(tile + i * kUnits, rows * 4, call_.last_state + head_->state_column(column + i) + row);
        }
      }
    }
  }
  static void transpose(const float* from, int64_t stride, float* tile) {
    transpose_tile(reinterpret_cast<const uint8_t*>(from), stride * 4, reinterpret_cast<uint8_t*>(tile));
  }

  // Of keys nobody asks, unless they are to be corrected for.
  void multiply_rows_with(const Matrix& b, int64_t columns, const Matrix& to) const {
    const int64_t first = call_.corrects ? 0 : steps_;
    multiply(below(rows_, first), 2 * steps_ - first, b, call_.depth, columns, nullptr, below(to, first));
  }

  // Keys and queries of a chunk as floats: rows, below each other; keys as columns, too.
  void load_rows(int64_t step) const {
    for (int64_t i = 0; i < steps_; ++i) {
      float* key = below(rows_, i).data;
      head_->load_key(step + i, key);
      head_->load_query(step + i, below(rows_, steps_ + i).data);
      for (int64_t row = 0; row < call_.depth; ++row) keys_.data[row * kChunk + i] = key[row];
    }
    for (int64_t i = steps_; i < kChunk; ++i) {
      for (int64_t row = 0; row < call_.depth; ++row) keys_.data[row * kChunk + i] = 0;
    }
  }
  // What keys and queries have in common with the chunk's keys, each less by the decay between the two, and the decays
  // since the chunk's beginning and until its end.
  void load_numbers(int64_t step) {
    multiply_rows_with(keys_, kChunk, among_);
    for (int64_t i = 0; i < steps_; ++i) rates_[i] = head_->rate(step + i);
    if (call_.decays_by_row) return load_row_decays(step);
    // In fp32 the difference of two sums that have grown would be off.
    double until[kChunk] = {}, total = 0;
    for (int64_t i = 0; i < steps_; ++i) until[i] = total += head_->decay(step + i);
    alignas(64) float between[kChunk];
    const auto find_between = [&](double end) {
      for (int64_t j = 0; j < kChunk; ++j) between[j] = static_cast<float>(end - until[j]);
    };
    find_between(total);
    for (int64_t i = 0; i < kChunk; i += kWidth) store(ahead_ + i, exp(load(between + i)));
    for (int64_t j = 0; j < kChunk; ++j) between[j] = static_cast<float>(until[j]);
    for (int64_t i = 0; i < kChunk; i += kWidth) store(since_ + i, exp(load(between + i)));
    for (int64_t i = 0; i < steps_; ++i) {
      float *keys = below(among_, i).data, *queries = below(among_, steps_ + i).data;
      find_between(until[i]);
      for (int64_t j = 0; j < kChunk; j += kWidth) {
        const F factor = exp(load(between + j));  // of later steps, nobody asks
        if (call_.corrects) store(keys + j, mul(load(keys + j), factor));
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
      kept_[row] = __builtin_expf(head_->decay(step, row));
      key[row] *= kept_[row];
      query[row] *= kept_[row];
    }
  }

  template <bool Corrects>
  void write(int64_t step) const {
    int64_t column = 0;
    for (; column + 4 * kWidth <= columns_; column += 4 * kWidth) write_columns<4, Corrects>(step, column);
    for (; column < columns_; column += kWidth) write_columns<1, Corrects>(step, column);
  }
  // V vectors of columns: what each step writes, which takes the place of what it has read, and gives.
  template <int V, bool Corrects>
  XOPT_INLINE void write_columns(int64_t step, int64_t column) const {
    for (int64_t i = 0; i < steps_; ++i) {
      const float *keys = below(among_, i).data, *queries = below(among_, steps_ + i).data;
      float* read_row = below(sums_, i).data + column;
      const float* out_row = below(sums_, steps_ + i).data + column;
      F read[V], out[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        read[v] = Corrects ? mul(load(read_row + v * kWidth), set1(since_[i])) : set1(0.0F);
        out[v] = mul(load(out_row + v * kWidth), set1(since_[i]));
      }
      for (int64_t j = 0; j < i; ++j) {
        const float* written = below(sums_, j).data + column;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          if constexpr (Corrects) read[v] = fma(set1(keys[j]), load(written + v * kWidth), read[v]);
          out[v] = fma(set1(queries[j]), load(written + v * kWidth), out[v]);
        }
      }
      const int64_t from = head_->value_place(step + i) + column;
      const int64_t to = head_->out_place(step + i) + column;
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const int64_t left = count_ - column - v * kWidth;
        const F value = load_any(call_.value.data, call_.dtype, from + v * kWidth, left);
        const F written = mul(Corrects ? sub(value, read[v]) : value, set1(rates_[i]));
        store(read_row + v * kWidth, written);
        store(below(written_, i).data + column + v * kWidth, mul(written, set1(ahead_[i])));
        store_any(call_.out, call_.out_dtype, to + v * kWidth, fma(set1(queries[i]), written, out[v]), left);
      }
    }
  }

  const LinearAttentionCall& call_;
  const LinearAttentionItems& plan_;
  const LinearAttentionHead* head_ = nullptr;
  const int64_t chunk_;
  const Scratch memory_;
  Matrix state_, sums_, written_;    // [depth], [keys, then queries], [step], by columns
  Matrix rows_, keys_, among_;       // [keys, then queries][depth], [depth][step], [keys, then queries][step]
  Matrix staged_;                    // columns of the state
  float* kept_;                      // [depth]: of the state's rows, until the chunk's end
  int64_t count_ = 0, columns_ = 0;  // of an item: columns, and with padding
  int64_t steps_ = 0;                // of the chunk at hand
  // Of a step: the decay since the chunk's beginning and until its end, and its rate.
  alignas(64) float since_[kChunk], ahead_[kChunk], rates_[kChunk];
};

template <class Thread>
void linear_attention_by(const LinearAttentionCall& call) {
  const LinearAttentionItems plan(call);
  for_each_item(plan.items, max_threads(),
                [&] { return [thread = Thread(call, plan)](int64_t item) mutable { thread.compute(item); }; });
}

void linear_attention(const LinearAttentionCall& call) {
  call.steps == 1 ? linear_attention_by<LinearAttentionStep>(call) : linear_attention_by<LinearAttentionThread>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(linear_attention, f32, linear_attention);

}  // namespace xopt::XOPT_ISA
