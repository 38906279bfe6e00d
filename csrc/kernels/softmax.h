// Softmax over rows: the contract of the kernel "softmax" (dtype f32, that of its arithmetic; input and output may be any
// of the three floating dtypes). A row with a NaN or a positive infinity, or of negative infinities alone, is NaN, as in torch.
#pragma once

#include "tiles/types.h"

namespace xopt {

struct SoftmaxCall {
  int64_t rows, columns;
  RowsView input;
  void* out;  // contiguous
  DType out_dtype;
};

using SoftmaxFn = void(const SoftmaxCall& call);

}  // namespace xopt
