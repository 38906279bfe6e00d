// A causal convolution. See causal_conv.h.
// isa: scalar avx2 avx512 avx512_bf16
//
//   item      64 channels of a sequence, whichever thread takes them
//    chunk     16 steps, whose inputs are brought into rows of channels behind those of the steps before
//     step      a sum of rows, each by its tap's weights
#include "kernels/causal_conv.h"

#include <algorithm>

#include "kernels/column_values.h"
#include "kernels/each_item.h"
#include "kernels/series_rows.h"
#include "runtime/arena.h"
#include "runtime/registry.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kChannels = kSeriesColumns;

class CausalConvThread {
 public:
  explicit CausalConvThread(const CausalConvCall& call)
      : call_(call),
        before_(std::max(call.taps - 1, call.kept)),
        taps_(round_up(call.taps, kUnits)),
        memory_(static_cast<size_t>((before_ + kSeriesChunk + taps_) * kChannels) * sizeof(float)) {
    weight_ = memory_.as<float>();
    rows_ = weight_ + taps_ * kChannels;
  }

  void compute(int64_t item) {
    const int64_t parts = ceil_div(call_.channels, kChannels);
    batch_ = item / parts;
    channel_ = item % parts * kChannels;
    count_ = minimum(kChannels, call_.channels - channel_);
    ColumnValues::spread(call_.bias, call_.channels, channel_, kChannels, bias_);
    load_turned(call_.weight, call_.weight_dtype, channel_ * call_.taps, count_, call_.taps, weight_);
    begin();
    for (int64_t step = 0; step < call_.steps; step += kSeriesChunk) {
      const int64_t steps = minimum(kSeriesChunk, call_.steps - step);
      load_chunk(call_.input, {batch_, step, steps, channel_, count_}, kChannels, rows_ + before_ * kChannels);
      for (int64_t i = 0; i < steps; ++i) write(step, i);
      std::copy_n(rows_ + steps * kChannels, before_ * kChannels, rows_);  // forwards: what overlaps was read before
    }
    end();
  }

 private:
  int64_t first_kept() const { return (batch_ * call_.channels + channel_) * call_.kept; }

  // A state has a row for each step before the first.
  void begin() {
    if (call_.kept == 0) {
      std::fill_n(rows_, before_ * kChannels, 0.0F);
    } else if (call_.state_by_steps) {
      const Series kept{call_.state, call_.state_dtype, call_.kept * call_.channels, call_.channels, 1};
      load_chunk(kept, {batch_, 0, call_.kept, channel_, count_}, kChannels, rows_);
    } else {
      load_turned(call_.state, call_.state_dtype, first_kept(), count_, call_.kept, rows_);
    }
  }
  void end() const {
    if (!call_.state_by_steps) {
      return store_turned(rows_, count_, call_.kept, call_.last_state, call_.state_dtype, first_kept());
    }
    for (int64_t i = 0; i < call_.kept; ++i) {
      const int64_t to = (batch_ * call_.kept + i) * call_.channels + channel_;
      for (int64_t channel = 0; channel < count_; channel += kWidth) {
        const F values = load(rows_ + i * kChannels + channel);
        store_any(call_.last_state, call_.state_dtype, to + channel, values, count_ - channel);
      }
    }
  }

  // A step, which is step `i` of the chunk.
  void write(int64_t chunk, int64_t i) const {
    const float* first = rows_ + (before_ - (call_.taps - 1) + i) * kChannels;
    const int64_t to = (batch_ * call_.steps + chunk + i) * call_.channels + channel_;
    for (int64_t channel = 0; channel < count_; channel += kWidth) {
      F sum = load(bias_ + channel);
      for (int64_t k = 0; k < call_.taps; ++k) {
        sum = fma(load(weight_ + k * kChannels + channel), load(first + k * kChannels + channel), sum);
      }
      if (call_.silu) sum = activate<Activation::silu>(sum, set1(0.0F), set1(0.0F));
      store_any(call_.out, call_.out_dtype, to + channel, sum, count_ - channel);
    }
  }

  const CausalConvCall& call_;
  const int64_t before_;  // rows of steps before a chunk
  const int64_t taps_;    // up to whole vectors
  const Scratch memory_;
  float *weight_, *rows_;                        // [tap][channel], [step][channel]
  int64_t batch_ = 0, channel_ = 0, count_ = 0;  // of the item
  alignas(64) float bias_[kChannels];
};

void causal_conv(const CausalConvCall& call) {
  const int64_t items = call.batch * ceil_div(call.channels, kChannels);
  for_each_item(items, max_threads(),
                [&] { return [thread = CausalConvThread(call)](int64_t item) mutable { thread.compute(item); }; });
}

}  // namespace

XOPT_REGISTER_KERNEL(causal_conv, f32, causal_conv);

}  // namespace xopt::XOPT_ISA
