// Sums, differences and products of two tensors, element by element and broadcast: the contract of the kernel "combine"
// (dtype f32, that of its arithmetic; the tensors have the same of the three floating dtypes). A NaN stays one, also under
// a relu.
#pragma once

#include "tiles/types.h"

namespace xopt {

enum class Combine : uint8_t { add, sub, mul };

struct CombineCall {
  static constexpr int kDims = 8;

  struct Part {
    const void* data;
    int64_t stride[kDims];  // elements; 0: the part has one value for all
  };

  Combine how;
  bool relu;
  DType dtype;
  // From the outermost to the innermost in memory of `out`.
  int64_t size[kDims];
  Part parts[2];
  void* out;
  int64_t out_stride[kDims];  // elements; of the innermost 1
};

using CombineFn = void(const CombineCall& call);

}  // namespace xopt
