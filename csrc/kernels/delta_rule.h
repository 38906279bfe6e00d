// The gated delta rule, linear attention whose memory is a matrix for each head of values: each step of time forgets a
// little of it, reads what it has for a key, and corrects that towards a value.
//
//   state = exp(decay) * state
//   state = state + key (x) (rate * (value - key^T state))
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

struct DeltaRuleCall {
  int64_t batch, steps, heads, group;  // heads of values
  int64_t depth, value_depth;          // the state's rows and columns
  DType dtype;                         // of queries, keys, values and outputs
  HeadsView query, key, value;         // rows are steps
  StepNumbers decay, rate;
  bool decays_by_row;  // of the state
  bool unit_length;    // queries and keys are divided by sqrt(their squares' sum + eps)
  float eps, scale;    // of queries
  const void* state;   // [batch, heads, depth, value_depth], contiguous; nullptr: zeros
  DType state_dtype;
  void* out;          // [batch, steps, heads, value_depth], contiguous
  float* last_state;  // as `state`
};

using DeltaRuleFn = void(const DeltaRuleCall& call);  // kernel "delta_rule", dtype f32, that of its arithmetic

}  // namespace xopt
