// Max and average pooling in channels_last, and the square root of the sum of squares (norm): the contract of the kernel
// "pool" (dtype f32, that of its arithmetic; input and output have the same of the three floating dtypes). A NaN under the window is the maximum, as in torch.
// Squares are fp32: values from about 1e-19 to 1e19 have a norm.
#pragma once

#include "tiles/types.h"

namespace xopt {

enum class Pool : uint8_t { max, average, norm };

struct PoolCall {
  Pool kind;
  PatchesView input;  // with as many output positions as there are to be, also where the last window hangs over
  int64_t images;
  int64_t padding_after[3];  // average: counted as part of the input
  bool counts_padding;       // average: zeros of the padding count as values
  int64_t divisor;           // average: instead of the number of values; 0: none given
  bool adaptive;             // windows cover the input as evenly as they can, whatever strides and paddings are
  void* out;                 // [images, positions, channels]
  int64_t out_row_stride;    // elements from a position to the next
};

// The places of a window along one dimension that lie inside: `count` from `first` on, and how many there are with the
// padding.
struct PoolWindow {
  int64_t first, count, with_padding;
};

// Of internal linkage: every level compiles its own, and so do device sources.
static inline PoolWindow pool_window(const PoolCall& call, int dim, int64_t position) {
  const PatchesView& v = call.input;
  if (call.adaptive) {
    const int64_t first = position * v.in[dim] / v.out[dim];
    const int64_t count = ((position + 1) * v.in[dim] + v.out[dim] - 1) / v.out[dim] - first;
    return {first, count, count};
  }
  const int64_t begin = position * v.stride[dim] - v.padding[dim], dilation = v.dilation[dim];
  const int64_t skipped = begin < 0 ? (-begin + dilation - 1) / dilation : 0;
  const int64_t inside = v.in[dim] - begin <= 0 ? 0 : (v.in[dim] - begin + dilation - 1) / dilation;
  const int64_t end = inside < v.kernel[dim] ? inside : v.kernel[dim];
  const int64_t padded = v.in[dim] + call.padding_after[dim];
  const int64_t padded_end = begin + v.kernel[dim] < padded ? begin + v.kernel[dim] : padded;
  return {begin + skipped * dilation, end > skipped ? end - skipped : 0, padded_end - begin};
}

using PoolFn = void(const PoolCall& call);

}  // namespace xopt
