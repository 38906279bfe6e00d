// Rotary position embedding of queries and keys: the contract of the kernel "rotary" (dtype f32, that of the products).
// The first `rotated` of a row's columns are turned, the others are copied. With half = rotated / 2:
//
//   halves        out[i] = x[i] * cos[i] - x[i + half] * sin[i]                  i < half
//                 out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]
//   interleaved   out[2i] = x[2i] * cos[2i] - x[2i + 1] * sin[2i]
//                 out[2i + 1] = x[2i + 1] * cos[2i + 1] + x[2i] * sin[2i + 1]
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

// [batch, positions, rotated]; a batch stride of 0 broadcasts.
struct Angles {
  const void* data;
  DType dtype;
  int64_t batch_stride, row_stride;
};

struct RotaryCall {
  int64_t batch, positions, depth;
  int64_t rotated;  // even, depth at most
  bool interleaved;
  DType dtype;
  RotatedHeads tensors[2];  // query and key
  Angles cos, sin;
};

using RotaryFn = void(const RotaryCall& call);

}  // namespace xopt
