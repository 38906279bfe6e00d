// What convolutions and transposed ones have in common: the check of the input, what follows the sums, and the run of
// a call.
#pragma once

#include "kernels/conv.h"
#include "ops/conv_layout.h"
#include "ops/gemm_arguments.h"

namespace xopt::ops {

// Images and spatial dimensions as the rows of a matrix; false where that takes more than two levels.
bool collapse_positions(const Tensor& image, RowsView* view);

// Of `dims` spatial dimensions, and with the channels of all groups.
void check_conv_input(const char* op, const Tensor& input, int64_t dims, int64_t group_in, int64_t groups,
                      std::initializer_list<DType> dtypes = kFloating);

// How the kernel moves over the input, in the order of the schemas.
struct ConvGeometry {
  explicit ConvGeometry(Stack& stack)
      : stride(stack.integers()), padding(stack.integers()), dilation(stack.integers()), groups(stack.integer()) {}

  // Everything about the input but its strides and data.
  PatchesView view(const char* op, const Tensor& input, const ConvLayout& layout) const;

  Integers stride, padding, dilation;
  int64_t groups;
};

// What follows a convolution of floats, in the order of both schemas.
struct ConvAfter {
  explicit ConvAfter(Stack& stack)
      : scale(stack.optional_tensor()), fused(stack), out_dtype(stack.optional_dtype_code()) {}
  // Scale and output dtype; the rest is for conv_output.
  void set(const char* op, const Tensor& input, int64_t channels, Epilogue* epilogue);

  Tensor scale;
  FusedArguments fused;
  std::optional<int32_t> out_dtype;
};

// A new output of these sizes and the epilogue's dtype, and the rest of the epilogue that writes it. Tensors that it
// cannot read are replaced by copies.
Tensor conv_output(const char* op, Tensor* bias, FusedArguments* fused, const int64_t* sizes, int64_t dims,
                   Epilogue* epilogue);

// The same for a call that is complete but for this and the input's data, if there is anything to compute.
Tensor complete_call(const char* op, Tensor* input, Tensor* bias, FusedArguments* fused, const ConvLayout& layout,
                     ConvCall* call);

// A call and the kernel that it is for: where it collapses to a product, that of these rows. Max pooling is a call without
// weights: where it follows a convolution, both may be done in bands (conv_bands.h).
struct ReadyConv {
  ConvCall call;
  bool depthwise = false, is_product = false;
  RowsView rows{};
  bool is_max_pool = false;
  int64_t rest_groups = 0;  // which are too few for a product like the others
};
void run_ready(const ReadyConv& conv);

// `input`: the tensor that the call's view is of.
ReadyConv ready_conv(const ConvCall& call, const Tensor& input, const ConvLayout& layout);
// Runs it, or plans it where that is being done.
void run_or_plan(const ReadyConv& conv);

}  // namespace xopt::ops
