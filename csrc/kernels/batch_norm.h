// A BatchNorm by running statistics that no product takes along, with what follows it: the contract of the kernel
// "batch_norm" (dtype f32, that of its arithmetic; input and output may be any of the three floating dtypes).
//
//   out = epilogue((x - mean) / sqrt(variance + eps) * weight + bias), of each channel
#pragma once

#include "kernels/gemm.h"

namespace xopt {

struct BatchNormCall {
  RowsView input;  // a row has the channels of a position
  int64_t rows, channels;
  ColumnVector mean, variance, weight;  // the bias is the epilogue's
  float eps;
  Epilogue epilogue;  // of floats, without a scale or a row's norm
};

using BatchNormFn = void(const BatchNormCall& call);

}  // namespace xopt
