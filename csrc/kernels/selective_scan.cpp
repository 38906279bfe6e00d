// The scan of a state space. See selective_scan.h.
// isa: scalar avx2 avx512 avx512_bf16
//
//   item      64 channels of a sequence, whichever thread takes them; their states stay in L1
//    chunk     16 steps, whose inputs are brought into rows of channels, as floats
//     step      for each vector of channels all its states, four of which decay side by side
//
// Almost all of the time goes into exponentials: one for each step, channel and state.
#include "kernels/selective_scan.h"

#include <utility>

#include "kernels/column_values.h"
#include "kernels/each_item.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"
#include "tiles/transpose.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kChannels = 64;  // of an item
constexpr int64_t kChunk = kUnits;
constexpr int64_t kAtOnce = 4;  // states of a channel

// e^x, which is 0 where it would become a denormal.
XOPT_INLINE void decays(F (&x)[kAtOnce]) {
  constexpr float kSmallest = -87.0F, kLargest = 88.0F;
  F inside[kAtOnce];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kAtOnce; ++i) inside[i] = min(set1(kLargest), max(set1(kSmallest), x[i]));  // keeps NaN
  exp_inside(inside);
#pragma GCC unroll 4
  for (int64_t i = 0; i < kAtOnce; ++i) x[i] = select_less(x[i], set1(kSmallest), set1(0.0F), inside[i]);
}

// log(1 + e^x): of 1 + t the logarithm is 2 atanh(t / (2 + t)), whose series ends soon for t of at most 1.
XOPT_INLINE F softplus(F x) {
  const F t = exp(negative(abs(x))), s = div(t, add(set1(2.0F), t)), square = mul(s, s);
  F p = set1(1.0F / 13.0F);
  constexpr float kLower[] = {1.0F / 11.0F, 1.0F / 9.0F, 1.0F / 7.0F, 0.2F, 1.0F / 3.0F, 1.0F};
#pragma GCC unroll 6
  for (const float c : kLower) p = fma(p, square, set1(c));
  return add(max(set1(0.0F), x), mul(add(s, s), p));
}

class SelectiveScanThread {
 public:
  explicit SelectiveScanThread(const SelectiveScanCall& call)
      : call_(call),
        states_(round_up(call.states, kUnits)),
        memory_(static_cast<size_t>(states_ * (2 * kChannels + 2 * kChunk) + 3 * kChunk * kChannels) * sizeof(float)) {
    float* at = memory_.as<float>();
    const auto take = [&](int64_t values) { return std::exchange(at, at + values); };
    state_ = take(states_ * kChannels);
    a_ = take(states_ * kChannels);
    input_ = take(kChunk * kChannels);
    dt_ = take(kChunk * kChannels);
    gate_ = take(kChunk * kChannels);
    b_ = take(kChunk * states_);
    c_ = take(kChunk * states_);
  }

  void compute(int64_t item) {
    const int64_t parts = ceil_div(call_.channels, kChannels);
    batch_ = item / parts;
    channel_ = item % parts * kChannels;
    count_ = minimum(kChannels, call_.channels - channel_);
    ColumnValues::spread(call_.skip, call_.channels, channel_, kChannels, skip_);
    ColumnValues::spread(call_.dt_bias, call_.channels, channel_, kChannels, bias_);
    load_columns(call_.a, call_.a_dtype, channel_ * call_.states, a_);
    load_columns(call_.state, call_.state_dtype, (batch_ * call_.channels + channel_) * call_.states, state_);
    for (int64_t step = 0; step < call_.steps; step += kChunk) {
      steps_ = minimum(kChunk, call_.steps - step);
      load_chunk(call_.input, step, channel_, count_, kChannels, input_);
      load_chunk(call_.dt, step, channel_, count_, kChannels, dt_);
      if (call_.gate.data != nullptr) load_chunk(call_.gate, step, channel_, count_, kChannels, gate_);
      load_chunk(call_.b, step, 0, call_.states, states_, b_);
      load_chunk(call_.c, step, 0, call_.states, states_, c_);
      for (int64_t i = 0; i < steps_; ++i) scan(step, i);
    }
    store_columns((batch_ * call_.channels + channel_) * call_.states);
  }

 private:
  // [channels, states] from an element on, as [state][channel]; zeros where there are none, and without data.
  void load_columns(const void* data, DType dtype, int64_t from, float* to) const {
    alignas(64) float rows[kUnits * kUnits], tile[kUnits * kUnits];
    for (int64_t channel = 0; channel < kChannels; channel += kUnits) {
      for (int64_t state = 0; state < states_; state += kUnits) {
        for (int64_t i = 0; i < kUnits; ++i) {
          const int64_t first = from + (channel + i) * call_.states + state;
          const bool exists = data != nullptr && channel + i < count_;
          load_run(data, dtype, first, exists ? call_.states - state : 0, rows + i * kUnits);
        }
        transpose(rows, tile);
        for (int64_t i = 0; i < kUnits; ++i) copy_units(tile + i * kUnits, to + (state + i) * kChannels + channel);
      }
    }
  }
  void store_columns(int64_t to) const {
    for (int64_t channel = 0; channel < count_; ++channel) {
      for (int64_t state = 0; state < call_.states; ++state) {
        call_.last_state[to + channel * call_.states + state] = state_[state * kChannels + channel];
      }
    }
  }

  // A chunk's values of `count` columns as [step][column], with zeros up to `padded` columns. Series whose steps lie side
  // by side are brought in by tiles.
  void load_chunk(const Series& series, int64_t step, int64_t first, int64_t count, int64_t padded, float* to) const {
    const int64_t from = batch_ * series.batch_stride + step * series.step_stride + first * series.column_stride;
    if (series.step_stride == 1 && series.column_stride != 1) {
      alignas(64) float rows[kUnits * kUnits], tile[kUnits * kUnits];
      for (int64_t column = 0; column < padded; column += kUnits) {
        for (int64_t i = 0; i < kUnits; ++i) {
          const int64_t steps = column + i < count ? steps_ : 0;
          load_run(series.data, series.dtype, from + (column + i) * series.column_stride, steps, rows + i * kUnits);
        }
        transpose(rows, tile);
        for (int64_t i = 0; i < steps_; ++i) copy_units(tile + i * kUnits, to + i * padded + column);
      }
      return;
    }
    for (int64_t i = 0; i < steps_; ++i) {
      const int64_t row = from + i * series.step_stride;
      for (int64_t column = 0; column < padded; column += kUnits) {
        float* units = to + i * padded + column;
        if (series.column_stride == 1 || count <= 1) {
          load_run(series.data, series.dtype, row + column, count - column, units);
          continue;
        }
        for (int64_t j = 0; j < kUnits; ++j) {
          const int64_t at = row + (column + j) * series.column_stride;
          units[j] = 0;
          if (column + j < count) store_first(units + j, load_any(series.data, series.dtype, at, 1), 1);
        }
      }
    }
  }
  // The first `count` of 16 values, and zeros.
  static void load_run(const void* data, DType dtype, int64_t from, int64_t count, float* to) {
    for (int64_t i = 0; i < kUnits; i += kWidth) {
      store(to + i, i < count ? load_any(data, dtype, from + i, count - i) : set1(0.0F));
    }
  }
  static void transpose(const float* rows, float* tile) {
    transpose_tile(reinterpret_cast<const uint8_t*>(rows), kUnits * 4, reinterpret_cast<uint8_t*>(tile));
  }
  static void copy_units(const float* from, float* to) {
    for (int64_t i = 0; i < kUnits; i += kWidth) store(to + i, load(from + i));
  }

  // A step of all channels, which is step `i` of the chunk.
  void scan(int64_t chunk, int64_t i) const {
    const float *b = b_ + i * states_, *c = c_ + i * states_;
    const int64_t to = ((batch_ * call_.steps + chunk + i) * call_.channels) + channel_;
    for (int64_t channel = 0; channel < count_; channel += kWidth) {
      const F input = load(input_ + i * kChannels + channel);
      F dt = add(load(dt_ + i * kChannels + channel), load(bias_ + channel));
      if (call_.softplus) dt = softplus(dt);
      const F scaled = mul(dt, input);
      F sums[kAtOnce];
#pragma GCC unroll 4
      for (int64_t n = 0; n < kAtOnce; ++n) sums[n] = set1(0.0F);
      for (int64_t state = 0; state < call_.states; state += kAtOnce) {  // and zeros up to whole vectors
        F kept[kAtOnce];
#pragma GCC unroll 4
        for (int64_t n = 0; n < kAtOnce; ++n) kept[n] = mul(dt, load(a_ + (state + n) * kChannels + channel));
        decays(kept);
#pragma GCC unroll 4
        for (int64_t n = 0; n < kAtOnce; ++n) {
          float* at = state_ + (state + n) * kChannels + channel;
          const F now = fma(kept[n], load(at), mul(scaled, set1(b[state + n])));
          store(at, now);
          sums[n] = fma(now, set1(c[state + n]), sums[n]);
        }
      }
      F out = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
      out = fma(load(skip_ + channel), input, out);
      if (call_.gate.data != nullptr) {
        const F gate = load(gate_ + i * kChannels + channel);
        out = mul(out, mul(gate, sigmoid(gate)));
      }
      store_any(call_.out, call_.out_dtype, to + channel, out, count_ - channel);
    }
  }

  const SelectiveScanCall& call_;
  const int64_t states_;  // padded: the others are zeros
  const Scratch memory_;
  float *state_, *a_;                            // [state][channel]
  float *input_, *dt_, *gate_;                   // [step][channel], of a chunk
  float *b_, *c_;                                // [step][state]
  int64_t batch_ = 0, channel_ = 0, count_ = 0;  // of the item
  int64_t steps_ = 0;                            // of the chunk
  alignas(64) float skip_[kChannels], bias_[kChannels];
};

void selective_scan(const SelectiveScanCall& call) {
  const int64_t items = call.batch * ceil_div(call.channels, kChannels);
  for_each_item(items, max_threads(),
                [&] { return [thread = SelectiveScanThread(call)](int64_t item) mutable { thread.compute(item); }; });
}

}  // namespace

XOPT_REGISTER_KERNEL(selective_scan, f32, selective_scan);

}  // namespace xopt::XOPT_ISA
