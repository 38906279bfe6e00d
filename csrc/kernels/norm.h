// LayerNorm and RMSNorm over rows, with the addition before them: the contract of the kernel "norm" (dtype f32, that of
// all sums; inputs and outputs may be any of the three floating dtypes).
//
//   s = input + residual                       in fp32, not rounded before it is normalised
//   LayerNorm   out = (s - mean) / sqrt(variance + eps) * weight + bias
//   RMSNorm     out = s / sqrt(mean of squares + eps) * (weight + weight_offset)
#pragma once

#include "kernels/gemm.h"

namespace xopt {

struct NormCall {
  Norm norm;
  int64_t rows, columns;
  RowsView input;
  RowsView residual;  // data is nullptr where there is none
  ColumnVector weight, bias;
  float weight_offset, eps;
  void* out;  // contiguous, like `sum`
  DType out_dtype;
  void* sum;  // if given, s goes here, in the input's dtype
};

using NormFn = void(const NormCall& call);

}  // namespace xopt
