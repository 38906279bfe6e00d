// The gates of LSTM and GRU cells and the activation of plain ones, in one pass over a step's sums. See
// recurrent_gates.h.
// isa: scalar avx2 avx512 avx512_bf16
#include "kernels/recurrent_gates.h"

#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

// A block's units of one row. Each function goes through all of its vectors step by step: one vector after the other
// would wait for each step of an exp, and gates make up a quarter of a small layer's time.
constexpr int64_t kVectors = kRecurrentBlock / kWidth;
struct Units {
  F of[kVectors];

  static XOPT_INLINE Units load(const float* from) {
    return each([=](int64_t v) { return XOPT_ISA::load(from + v * kWidth); });
  }
  XOPT_INLINE void store(float* to) const {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) XOPT_ISA::store(to + v * kWidth, of[v]);
  }
  template <class Function>
  static XOPT_INLINE Units each(const Function& function) {
    Units units;
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) units.of[v] = function(v);
    return units;
  }
};

// A sigmoid within 1e-6 everywhere, and NaN where that is.
XOPT_INLINE Units gate(const Units& x) {
  constexpr float kFarthest = 40.0F;
  Units e =
      Units::each([&](int64_t v) { return min(set1(kFarthest), max(set1(-kFarthest), sub(set1(0.0F), x.of[v]))); });
  exp_inside(e.of);
  return Units::each([&](int64_t v) { return reciprocal(add(set1(1.0F), e.of[v])); });
}

// tanh likewise.
XOPT_INLINE Units squash(const Units& x) {
  constexpr float kFarthest = -80.0F;
  Units e = Units::each([&](int64_t v) { return max(set1(kFarthest), mul(abs(x.of[v]), set1(-2.0F))); });
  exp_inside(e.of);
  return Units::each([&](int64_t v) {
    const F large = mul(sub(set1(1.0F), e.of[v]), reciprocal(add(set1(1.0F), e.of[v]))), magnitude = abs(x.of[v]);
    return copy_sign(select_less(magnitude, set1(0.25F), small_tanh(magnitude), large), x.of[v]);
  });
}

// Both sums of each gate.
struct Sums {
  const float *input, *hidden;

  XOPT_INLINE Units of_input(int64_t gate) const { return Units::load(input + gate * kRecurrentBlock); }
  XOPT_INLINE Units of_hidden(int64_t gate) const { return Units::load(hidden + gate * kRecurrentBlock); }
  XOPT_INLINE Units both(int64_t gate) const {
    const Units one = of_input(gate), other = of_hidden(gate);
    return Units::each([&](int64_t v) { return add(one.of[v], other.of[v]); });
  }
};

template <RecurrentCell C>
XOPT_INLINE Units next_hidden(const Sums& sums, [[maybe_unused]] float* state) {
  if constexpr (C == RecurrentCell::lstm) {
    const Units enter = gate(sums.both(0)), forget = gate(sums.both(1)), fresh = squash(sums.both(2));
    const Units leave = gate(sums.both(3)), before = Units::load(state);
    const Units cell =
        Units::each([&](int64_t v) { return fma(enter.of[v], fresh.of[v], mul(forget.of[v], before.of[v])); });
    cell.store(state);
    const Units seen = squash(cell);
    return Units::each([&](int64_t v) { return mul(leave.of[v], seen.of[v]); });
  } else if constexpr (C == RecurrentCell::gru) {
    const Units reset = gate(sums.both(0)), update = gate(sums.both(1)), before = Units::load(state);
    const Units of_input = sums.of_input(2), of_hidden = sums.of_hidden(2);
    const Units fresh =
        squash(Units::each([&](int64_t v) { return fma(reset.of[v], of_hidden.of[v], of_input.of[v]); }));
    const Units hidden =
        Units::each([&](int64_t v) { return fma(update.of[v], sub(before.of[v], fresh.of[v]), fresh.of[v]); });
    hidden.store(state);
    return hidden;
  } else if constexpr (C == RecurrentCell::rnn_tanh) {
    return squash(sums.both(0));
  } else {
    const Units x = sums.both(0);
    return Units::each([&](int64_t v) { return max(set1(0.0F), x.of[v]); });
  }
}

void store_units(const Units& units, void* to, DType dtype, int64_t index, int64_t count) {
  for (int64_t v = 0; v < kVectors && v * kWidth < count; ++v) {
    store_any(to, dtype, index + v * kWidth, units.of[v], count - v * kWidth);
  }
}

template <RecurrentCell C>
void step(const RecurrentGatesCall& call) {
  constexpr int64_t kGates = recurrent_gate_count(C);
  for (int64_t row = 0; row < call.rows; ++row) {
    const float* input = call.input_sums + row * call.input_sums_stride;
    const float* hidden = call.hidden_sums + row * call.hidden_sums_stride;
    for (int64_t unit = 0; unit < call.units; unit += kRecurrentBlock) {
      float* state = call.state == nullptr ? nullptr : call.state + row * call.state_stride + unit;
      const Units units = next_hidden<C>({input + unit * kGates, hidden + unit * kGates}, state);
      const int64_t count = call.units - unit;
      store_units(units, call.hidden, call.hidden_dtype, row * call.hidden_stride + unit, count);
      if (call.out != nullptr) store_units(units, call.out, call.out_dtype, row * call.out_stride + unit, count);
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
