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
#include "kernels/series_rows.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kChannels = kSeriesColumns;  // of an item
constexpr int64_t kChunk = kSeriesChunk;
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
    load_turned(call_.a, call_.a_dtype, channel_ * call_.states, count_, call_.states, a_);
    load_turned(call_.state, call_.state_dtype, first_state(), count_, call_.states, state_);
    for (int64_t step = 0; step < call_.steps; step += kChunk) {
      steps_ = minimum(kChunk, call_.steps - step);
      const SeriesPart channels{batch_, step, steps_, channel_, count_}, states{batch_, step, steps_, 0, call_.states};
      load_chunk(call_.input, channels, kChannels, input_);
      load_chunk(call_.dt, channels, kChannels, dt_);
      if (call_.gate.data != nullptr) load_chunk(call_.gate, channels, kChannels, gate_);
      load_chunk(call_.b, states, states_, b_);
      load_chunk(call_.c, states, states_, c_);
      for (int64_t i = 0; i < steps_; ++i) scan(step, i);
    }
    store_turned(state_, count_, call_.states, call_.last_state, DType::f32, first_state());
  }

 private:
  int64_t first_state() const { return (batch_ * call_.channels + channel_) * call_.states; }

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
