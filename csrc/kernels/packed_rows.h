// Single rows of a packed weight in their plain layout: what an embedding needs whose table is a linear layer's weight.
#pragma once

#include "kernels/packed.h"

namespace xopt {

struct PackedRowsCall {
  const void* packed;      // of a single weight, f32, bf16 or f16
  const int64_t* indices;  // of output features, each within the weight
  int64_t count;
  void* out;  // contiguous [count, k] of the packed dtype
};
void packed_rows(const PackedRowsCall& call);

}  // namespace xopt
