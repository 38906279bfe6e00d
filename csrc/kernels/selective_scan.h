// The scan of a state space whose states decay each by themselves (Mamba): of each channel and each of its states
//
//   state = exp(dt * a) * state + dt * b * input
//   out   = (sum over states of c * state + skip * input) * silu(gate)
//
// with dt of a channel, b and c of a state, all three of each step. Arithmetic is fp32.
#pragma once

#include "kernels/gemm.h"
#include "kernels/series.h"
#include "tiles/types.h"

namespace xopt {

struct SelectiveScanCall {
  int64_t batch, steps, channels, states;
  Series input, dt, b, c;
  Series gate;  // without data: none
  const void* a;
  DType a_dtype;               // [channels, states], contiguous
  ColumnVector skip, dt_bias;  // of channels, or nothing
  bool softplus;               // of dt, after its bias was added
  const void* state;           // [batch, channels, states], contiguous; nullptr: zeros
  DType state_dtype;
  void* out;  // [batch, steps, channels], contiguous
  DType out_dtype;
  float* last_state;  // as `state`
};

using SelectiveScanFn = void(const SelectiveScanCall& call);  // kernel "selective_scan", dtype f32

}  // namespace xopt
