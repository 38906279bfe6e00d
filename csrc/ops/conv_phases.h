// A transposed convolution as ordinary ones. Output positions whose places differ by multiples of the stride meet the same
// taps of the kernel: they are a phase, which is a convolution of stride 1 over the whole input by these taps, in
// reversed order. Every tap belongs to one phase, so all phases together do the products of the source and no others.
//
// Its packed weight holds a packed matrix, with its header, for each phase that has taps: the phases along depth, then
// height, then width.
#pragma once

#include <vector>

#include "ops/conv_matrix.h"

namespace xopt::ops {

// Those of a phase along one dimension: first, first + step, ...
struct Taps {
  int64_t residue = 0;  // of its positions, counted with the padding, by the stride
  int64_t first = 0;
  int64_t count = 1;
};

struct ConvPhase {
  Taps taps[3];
  ConvLayout layout;
};

struct ConvPhases {
  int64_t in = 0, group_out = 0, groups = 1, dims = 0;
  int64_t kernel[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
  int64_t tap_step[3] = {1, 1, 1}, tap_dilation[3] = {1, 1, 1};  // from a tap of a phase to its next, in the kernel
                                                                 // and in the input
  bool cover_all = true;                                         // whether each output position has taps
  std::vector<ConvPhase> phases;

  int64_t out() const { return group_out * groups; }
  int64_t group_in() const { return in / groups; }
};

// Of a weight [in, out / groups, kernel...], whose sizes are named `name` in errors.
ConvPhases conv_phases(const char* op, const char* name, const ListView& sizes, int64_t groups, const Integers& stride,
                       const Integers& dilation);

// The part of a weight that a phase's convolution has, given the strides of the whole.
ConvWeightView phase_weight(const ConvPhases& phases, const ConvPhase& phase, const void* data, DType dtype,
                            const int64_t* strides);

// Where each phase's matrix begins in a packed weight of this dtype, and the size of all.
std::vector<int64_t> phase_offsets(const char* op, const ConvPhases& phases, DType dtype);
// The dtype of a packed weight, which must be one of these phases.
DType packed_phases_dtype(const char* op, const Tensor& packed, const ConvPhases& phases);

}  // namespace xopt::ops
