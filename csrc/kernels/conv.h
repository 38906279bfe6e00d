// Convolutions in channels_last: the contract of the kernels "conv" of dtypes f32, bf16 and f16 (the packed weight's; the
// input may be any of the three) and of s8s8 and u8s8 (the input's dtype, then the weight's), and of "conv_depthwise" (f32
// for all floats, s8s8 and u8s8).
//
// A convolution is a product C[m, n] = A[m, k] * W[n, k]^T with another view of A (PatchesView): m counts output
// positions, n output channels, k positions of the kernel and within each the input channels. What follows the product
// is as for GEMM. With several groups there is a product for each, or one for a few narrow groups that lie side by
// side, whose weights then are zero between groups: a panel has 32 columns anyway. (An infinite or NaN input so may reach
// the outputs of its neighbours too.) Each product's weights begin a panel of the packed weight.
//
// int8: one scale and one zero point for the whole input. Between the groups of a product, weights are not 0 but their
// column's zero point, and padding is the input's: the sums of rows and columns then are right as they are, at borders
// too.
//
// Narrow groups of floats, of which several fill a vector, are summed as depthwise ones are, but for most with tiles: "conv"
// hands them to "conv_depthwise" (kernels/narrow_sums.h).
//
// Depthwise: a group for each channel. Its packed weight is the matrix [channels, positions], whose tiles hold 16
// channels of a position side by side, as the sums over positions want them.
#pragma once

#include "kernels/gemm.h"

namespace xopt {

struct ConvCall {
  PatchesView input;  // of the first product's channels; depthwise: of all
  int64_t images;
  int64_t products;         // 1 if depthwise
  int64_t product_columns;  // output channels of each
  PackedWeight weight;      // of all of them
  Epilogue epilogue;        // likewise
  Tuning tuning = {};
  int64_t group_in = 0, group_out = 0;  // channels and outputs of each group; 0: all are one, or depthwise
};

using ConvFn = void(const ConvCall& call);

constexpr int64_t output_positions(const PatchesView& input) { return input.out[0] * input.out[1] * input.out[2]; }

}  // namespace xopt
