// What convolutions and transposed ones have in common: the check of the input, what follows the sums, and the run of
// a call.
#pragma once

#include "kernels/conv.h"
#include "ops/conv_layout.h"
#include "ops/gemm_arguments.h"

namespace xopt::ops {

// Of `dims` spatial dimensions, and with the channels of all groups.
void check_conv_input(const char* op, const Tensor& input, int64_t dims, int64_t group_in, int64_t groups);

// What follows a convolution, in the order of both schemas.
struct ConvAfter {
  explicit ConvAfter(Stack& stack)
      : scale(stack.optional_tensor()), fused(stack), out_dtype(stack.optional_dtype_code()) {}

  Tensor scale;
  FusedArguments fused;
  std::optional<int32_t> out_dtype;
};

// A new output of these sizes, and the epilogue that writes it. Tensors that it cannot read are replaced by copies.
Tensor conv_output(const char* op, const Tensor& input, Tensor* bias, ConvAfter* after, const int64_t* sizes,
                   int64_t dims, Epilogue* epilogue);

// Whether the kernel takes an input's channels from anywhere: where they are few, it copies them side by side itself.
bool takes_any_layout(const PatchesView& view, const ConvLayout& layout);

// `input`: the tensor that the call's view is of.
void run_conv(const ConvCall& call, const Tensor& input, const ConvLayout& layout);

// The operator xopt::conv, as torch calls it.
void conv(StableIValue* stack, uint64_t, uint64_t);

}  // namespace xopt::ops
