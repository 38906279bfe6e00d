// Nearest and linear interpolation of images in channels_last: the contract of the kernel "upsample" (dtype f32, that of
// its arithmetic; input and output have the same of the three floating dtypes).
//
// The result at an output position is a mixture of the input at two places along each dimension, or, for the nearest,
// the input at the first of them. Which places, and how much of each, is told for each dimension by itself.
#pragma once

#include "tiles/types.h"

namespace xopt {

struct Between {
  int64_t place[2];
  float weight[2];
};

struct UpsampleCall {
  PatchesView input;         // its kernel, stride, dilation and padding say nothing here
  const Between* places[3];  // for each output position along a dimension
  bool mixed[3];             // whether both places count along a dimension
  int64_t images;
  void* out;               // [images, positions, channels]
  int64_t out_row_stride;  // elements from a position to the next
};

using UpsampleFn = void(const UpsampleCall& call);

}  // namespace xopt
