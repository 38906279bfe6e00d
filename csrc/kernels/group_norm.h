// GroupNorm in channels_last, with an activation: the contract of the kernel "group_norm" (dtype f32, that of its
// arithmetic; input and output may be any of the three floating dtypes).
//
//   out = activation((x + shift - mean) / sqrt(variance + eps) * weight + bias), mean and variance of x + shift over the
//   positions and the channels of a group
#pragma once

#include "kernels/gemm.h"

namespace xopt {

struct GroupNormCall {
  const void* input;  // [images, positions, channels], contiguous
  DType dtype;
  int64_t images, positions, channels, groups;
  ColumnVector weight, bias;
  ColumnVector shift;    // of an image's channels, if it is there
  int64_t shift_stride;  // from an image's to the next; 0: all have the same
  float eps;
  Activation activation;  // none, relu or silu
  void* out;              // like the input
  DType out_dtype;
};

using GroupNormFn = void(const GroupNormCall& call);

}  // namespace xopt
