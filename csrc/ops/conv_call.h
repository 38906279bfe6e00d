// What convolutions and transposed ones have in common: checks of the input and of a residual, and the run of a call.
#pragma once

#include "kernels/conv.h"
#include "ops/conv_layout.h"

namespace xopt::ops {

// Of `dims` spatial dimensions, and with the channels of all groups.
void check_conv_input(const char* op, const Tensor& input, int64_t dims, int64_t group_in, int64_t groups);

// `other`, of the output's sizes, as the epilogue reads it; replaced by a copy where it cannot.
void set_residual(const char* op, Tensor* other, const int64_t* sizes, int64_t dims, Epilogue* epilogue);

// `input`: the tensor that the call's view is of.
void run_conv(const ConvCall& call, const Tensor& input, const ConvLayout& layout);

}  // namespace xopt::ops
