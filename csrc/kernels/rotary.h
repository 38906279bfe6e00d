// Rotary position embedding of queries and keys: the contract of the kernel "rotary" (dtype f32, that of the products).
//
//   out[i] = x[i] * cos[i] - x[i + half] * sin[i]                  i < half = depth / 2
//   out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
#pragma once

#include "tiles/types.h"

namespace xopt {

// [batch, heads, positions, depth] with strides in elements; columns are contiguous.
struct RotatedHeads {
  const void* data;
  int64_t heads;
  int64_t batch_stride, head_stride, row_stride;
  void* out;  // contiguous, of the input's dtype
};

// [batch, positions, depth]; a batch stride of 0 broadcasts.
struct Angles {
  const void* data;
  DType dtype;
  int64_t batch_stride, row_stride;
};

struct RotaryCall {
  int64_t batch, positions, depth;
  DType dtype;
  RotatedHeads tensors[2];  // query and key
  Angles cos, sin;
};

using RotaryFn = void(const RotaryCall& call);

}  // namespace xopt
