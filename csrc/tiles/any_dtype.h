// Loads and stores of vectors whose dtype is known only when the kernel runs. The branch is the same for a whole call and
// well predicted, which is cheaper than a kernel for each combination of dtypes.
#pragma once

#include "tiles/types.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// `count`: how many values there are from `index` on; a vector or more makes it a full one.
XOPT_INLINE F load_any(const void* data, DType dtype, int64_t index, int64_t count) {
  if (dtype == DType::f32) return load_first(static_cast<const float*>(data) + index, count);
  if (dtype == DType::bf16) return load_first(static_cast<const Bf16*>(data) + index, count);
  return load_first(static_cast<const F16*>(data) + index, count);
}

XOPT_INLINE void store_any(void* data, DType dtype, int64_t index, F x, int64_t count) {
  switch (dtype) {
    case DType::f32:
      return store_first(static_cast<float*>(data) + index, x, count);
    case DType::bf16:
      return store_first(static_cast<Bf16*>(data) + index, x, count);
    case DType::f16:
      return store_first(static_cast<F16*>(data) + index, x, count);
    case DType::s8:
      return store_first(static_cast<int8_t*>(data) + index, x, count);
    default:
      return store_first(static_cast<uint8_t*>(data) + index, x, count);
  }
}

}  // namespace xopt::XOPT_ISA
