// The gates of LSTM and GRU cells and the activation of plain ones, in one pass over a step's sums. See
// recurrent_gates.h.
// isa: scalar avx2 avx512 avx512_bf16
#include "kernels/recurrent_gates.h"

#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

// A vector's units of one row: both sums of each gate, and what they become.
struct Sums {
  const float *input, *hidden;

  XOPT_INLINE F of_input(int64_t gate) const { return load(input + gate * kRecurrentBlock); }
  XOPT_INLINE F of_hidden(int64_t gate) const { return load(hidden + gate * kRecurrentBlock); }
  XOPT_INLINE F both(int64_t gate) const { return add(of_input(gate), of_hidden(gate)); }
};

template <RecurrentCell C>
XOPT_INLINE F next_hidden(const Sums& sums, [[maybe_unused]] float* state) {
  if constexpr (C == RecurrentCell::lstm) {
    const F kept = mul(sigmoid(sums.both(1)), load(state));
    const F cell = fma(sigmoid(sums.both(0)), tanh(sums.both(2)), kept);
    store(state, cell);
    return mul(sigmoid(sums.both(3)), tanh(cell));
  } else if constexpr (C == RecurrentCell::gru) {
    const F fresh = tanh(fma(sigmoid(sums.both(0)), sums.of_hidden(2), sums.of_input(2)));
    const F hidden = fma(sigmoid(sums.both(1)), sub(load(state), fresh), fresh);
    store(state, hidden);
    return hidden;
  } else {
    return activate<C == RecurrentCell::rnn_tanh ? Activation::tanh : Activation::relu>(sums.both(0), set1(0.0F),
                                                                                        set1(0.0F));
  }
}

template <RecurrentCell C>
void step(const RecurrentGatesCall& call) {
  constexpr int64_t kGates = recurrent_gate_count(C);
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t unit = 0; unit < call.units; unit += kWidth) {
      const int64_t in_block = unit % kRecurrentBlock;
      const int64_t at = row * call.sums_stride + (unit - in_block) * kGates + in_block;
      float* state = call.state == nullptr ? nullptr : call.state + row * call.state_stride + unit;
      const F hidden = next_hidden<C>({call.input_sums + at, call.hidden_sums + at}, state);
      const int64_t count = call.units - unit;
      store_any(call.hidden, call.hidden_dtype, row * call.hidden_stride + unit, hidden, count);
      if (call.out != nullptr) store_any(call.out, call.out_dtype, row * call.out_stride + unit, hidden, count);
    }
  }
}

void recurrent_gates(const RecurrentGatesCall& call) {
  switch (call.cell) {
    case RecurrentCell::lstm:
      return step<RecurrentCell::lstm>(call);
    case RecurrentCell::gru:
      return step<RecurrentCell::gru>(call);
    case RecurrentCell::rnn_tanh:
      return step<RecurrentCell::rnn_tanh>(call);
    case RecurrentCell::rnn_relu:
      return step<RecurrentCell::rnn_relu>(call);
  }
}

void recurrent_rows(const RecurrentRowsCall& call) {
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t i = 0; i < call.columns; i += kWidth) {
      const F x = load_any(call.from, call.from_dtype, row * call.from_stride + i, call.columns - i);
      store_any(call.to, call.to_dtype, row * call.to_stride + i, x, call.columns - i);
    }
  }
}

}  // namespace

XOPT_REGISTER_KERNEL(recurrent_gates, f32, recurrent_gates);
XOPT_REGISTER_KERNEL(recurrent_rows, f32, recurrent_rows);

}  // namespace xopt::XOPT_ISA
