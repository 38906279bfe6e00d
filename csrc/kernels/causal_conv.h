// A short convolution along time, of each channel by itself, that sees no later step: of channel c and step t
//
//   out = silu(bias + sum over k of weight[k] * x[t - taps + 1 + k])
//
// where x goes on from what a state has kept of the steps before. Arithmetic is fp32.
#pragma once

#include "kernels/gemm.h"
#include "kernels/series.h"

namespace xopt {

struct CausalConvCall {
  int64_t batch, steps, channels, taps;
  Series input;
  const void* weight;
  DType weight_dtype;  // [channels, taps], contiguous
  ColumnVector bias;   // of channels, or nothing
  bool silu;
  int64_t kept;         // steps in a state, at least taps - 1; 0: zeros come before
  const void* state;    // [batch, channels, kept], contiguous, the last step last
  bool state_by_steps;  // it is [batch, kept, channels] in memory
  DType state_dtype;
  void* out;  // [batch, steps, channels], contiguous
  DType out_dtype;
  void* last_state;  // as `state`, of the same dtype
};

using CausalConvFn = void(const CausalConvCall& call);  // kernel "causal_conv", dtype f32

}  // namespace xopt
