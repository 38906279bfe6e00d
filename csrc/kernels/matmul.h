// out = alpha * left right + other, of many pairs of matrices: products of activations, of which neither is packed
// beforehand as a weight is.
//
// Sums are fp32; the addition is done on them before they are rounded to out_dtype.
#pragma once

#include "tiles/types.h"

namespace xopt {

// Matrices with strides in elements, and those of the leading dimensions, 0 where it is broadcast.
struct MatrixBatch {
  const void* data = nullptr;
  const int64_t* batch_strides = nullptr;
  int64_t row_stride = 0, column_stride = 0;
};

struct MatmulCall {
  int64_t dims = 0;  // leading ones, with their sizes
  const int64_t* sizes = nullptr;
  int64_t m = 0, n = 0, k = 0;
  // [m, k] and [k, n]. Of each, rows or columns are contiguous; those with one value are both.
  MatrixBatch left, right;
  float alpha = 1.0F;
  MatrixBatch other;  // [m, n], rows contiguous or one for all (a stride of 0); without data: none
  DType other_dtype = DType::f32;
  void* out = nullptr;  // [..., m, n], contiguous
  DType out_dtype = DType::f32;
};

using MatmulFn = void(const MatmulCall& call);  // kernel "matmul", dtype f32, bf16, f16: that of left and right

}  // namespace xopt
