// LayerNorm, RMSNorm and normalizing to length 1 over rows, with the addition before them: the contract of the kernel "norm" (dtype f32, that of
// all sums; inputs and outputs may be any of the three floating dtypes).
//
//   s = input + residual                       in fp32, not rounded before it is normalised
//   LayerNorm   out = (s - mean) / sqrt(variance + eps) * weight + bias
//   RMSNorm     out = s / sqrt(mean of squares + eps) * (weight + weight_offset)
//   unit norm   out = s / max(sqrt(sum of squares), eps)
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
  void* sum;        // if given, s goes here
  DType sum_dtype;  // the input's, or any where the input is of floats and nothing is added
};

using NormFn = void(const NormCall& call);

// The norm that a product ends with, of `rows` rows of its output from `first` on; `values`: their finished sums.
inline NormCall norm_after(const GemmCall& call, const float* values, int64_t first, int64_t rows) {
  const Epilogue& e = call.epilogue;
  const int64_t n = call.weight.n, offset = first * n * dtype_size(e.out_dtype);
  NormCall norm{};
  norm.norm = e.norm;
  norm.rows = rows;
  norm.columns = n;
  norm.input = {values, DType::f32, rows, n, 0};
  norm.weight = e.norm_weight;
  norm.bias = e.norm_bias;
  norm.eps = e.norm_eps;
  norm.out = static_cast<uint8_t*>(e.out) + offset;
  norm.out_dtype = norm.sum_dtype = e.out_dtype;
  if (e.sum != nullptr) norm.sum = static_cast<uint8_t*>(e.sum) + offset;
  return norm;
}

}  // namespace xopt
