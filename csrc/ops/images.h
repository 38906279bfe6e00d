// What operators on images, [batch, channels, spatial...] with 1 to 3 spatial dimensions, have in common: they compute
// with the channels last in memory, where the three spatial dimensions of a PatchesView have ones in front.
#pragma once

#include "ops/check.h"

namespace xopt::ops {

inline bool is_channels_last(const Tensor& tensor) { return tensor.stride(1) == 1 || tensor.size(1) <= 1; }
// The same, of an image without anything between its elements.
bool is_dense_channels_last(const Tensor& image);

// `count` numbers of at least `least`, and small enough for sums of them.
void check_integers(const char* op, const char* name, const Integers& values, int64_t count, int64_t least);

// Data and strides of an input, which is replaced by a copy if its channels are not last, unless they may be anywhere.
void set_input(Tensor* input, PatchesView* view, bool any_layout = false);

}  // namespace xopt::ops
