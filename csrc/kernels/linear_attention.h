// Linear attention whose memory is a matrix for each head of values. Each step of time forgets a little of it and writes
// a key and its value into it, or, as the gated delta rule has it, corrects what it reads for the key towards the value.
//
//   state = exp(decay) * state
//   state = state + key (x) (rate * value)                         or (rate * (value - key^T state)), if it corrects
//   out   = query^T state
//
// `group` neighbouring heads of values have a head of queries and keys in common. Arithmetic is fp32.
#pragma once

#include "tiles/types.h"

namespace xopt {

// [batch, heads, steps], or with a value for each row of the state as well.
struct StepNumbers {
  const void* data;
  DType dtype;
  int64_t batch_stride, head_stride, step_stride, row_stride;
};

struct LinearAttentionCall {
  int64_t batch, steps, heads, group;  // heads of values
  int64_t depth, value_depth;          // the state's rows and columns
  DType dtype, out_dtype;              // of queries, keys and values; of outputs
  HeadsView query, key, value;         // rows are steps
  StepNumbers decay, rate;
  bool corrects;
  bool decays_by_row;     // of the state
  bool unit_length;       // queries and keys are divided by sqrt(their squares' sum + eps)
  float eps, scale;       // of queries
  const void* state;      // [batch, heads, depth, value_depth], contiguous; nullptr: zeros
  bool state_by_columns;  // [batch, heads, value_depth, depth], this one and the last
  DType state_dtype;
  void* out;          // [batch, steps, heads, value_depth], contiguous
  float* last_state;  // as `state`
};

// Kernel "linear_attention", dtype f32, that of its arithmetic.
using LinearAttentionFn = void(const LinearAttentionCall& call);

}  // namespace xopt
