// C[m, n] = epilogue(A[m, k] * W[n, k]^T) with W packed. The contract of the kernels "gemm" of dtypes f32, bf16, f16
// (the packed weight's dtype; A may be any of the three and is converted on its way in) and of s8s8 and u8s8 (A's
// dtype, then W's; int32 accumulation).
//
// The value of an element goes: accumulator -> dequantised (int8), or * scale -> + bias -> activation -> binary with `other`
// (or binary, then activation) -> [gated: act(gate) * up] -> [+ residual, norm over the row] -> rounded to out_dtype.
// All of it happens in fp32 while the block is in L1. Results do not depend on the number of threads.
#pragma once

#include "kernels/packed.h"
#include "runtime/tuning.h"
#include "tiles/types.h"

namespace xopt {

// Rows a multiple of so many bytes apart meet in two sets of L1, of which it has 64 of 64 bytes.
inline constexpr int64_t kMeetingBytes = 2048;

// Where the rows of an output lie that are not one distance apart: row r is the r-th of the positions of images that are
// `size` (depth, height, width).
struct OutPositions {
  int64_t size[3];
  int64_t stride[3];  // elements
  int64_t image_stride;
};

// A vector over the output columns, or nullptr.
struct ColumnVector {
  const void* data = nullptr;
  DType dtype = DType::f32;  // f32, bf16 or f16
};

struct Epilogue {
  ColumnVector scale;  // what sums of floats are multiplied by before the bias (a BatchNorm after a convolution)
  ColumnVector bias;
  ColumnVector up_bias;  // gated only
  Activation activation = Activation::none;
  float alpha = 0.0F, beta = 0.0F;

  Binary binary = Binary::none;
  bool activation_last = false;  // act(x op other) instead of act(x) op other
  const void* other = nullptr;
  DType other_dtype = DType::f32;
  int64_t other_row_stride = 0;  // elements; 0: one row for all

  // The row norm of (value + residual). The residual is `other` with Binary::add.
  Norm norm = Norm::none;
  ColumnVector norm_weight, norm_bias;
  float norm_eps = 0.0F;
  void* sum = nullptr;  // if given, the sum before the norm goes here, in out_dtype, contiguous [m, n]

  // int8: real value = (acc - zero points' part) * row_scale * column scale (held by the packed weight).
  const float* row_scale = nullptr;  // one per row, or one for all
  bool row_scale_per_row = false;
  const int32_t* row_zero_point = nullptr;  // nullptr: 0
  bool row_zero_point_per_row = false;

  void* out = nullptr;
  DType out_dtype = DType::f32;
  int64_t out_row_stride = 0;               // elements
  const OutPositions* positions = nullptr;  // in place of out_row_stride, for `other` as well
  float out_scale = 1.0F;                   // s8, u8: stored = clamp(round_to_even(value / out_scale) + out_zero_point)
  int32_t out_zero_point = 0;

  // The same for the columns from `first` on, without a norm.
  [[nodiscard]] Epilogue from_column(int64_t first) const;
};

struct GemmCall {
  int64_t m;  // n and k are the weight's
  RowsView a;
  PackedWeight weight;
  Epilogue epilogue;
  Tuning tuning = {};
};

using GemmFn = void(const GemmCall&);

// Products of so many rows or more take the same instructions at a level, so that a row's result does not depend on how
// many there are. Those of fewer may round otherwise.
inline constexpr int64_t kLeastRowsOfMany = 8;

}  // namespace xopt
