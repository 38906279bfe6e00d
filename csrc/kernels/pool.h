// Max and average pooling in channels_last: the contract of the kernel "pool" (dtype f32, that of its arithmetic; input
// and output have the same of the three floating dtypes). A NaN under the window is the maximum, as in torch.
#pragma once

#include "tiles/types.h"

namespace xopt {

enum class Pool : uint8_t { max, average };

struct PoolCall {
  Pool kind;
  PatchesView input;  // with as many output positions as there are to be, also where the last window hangs over
  int64_t images;
  int64_t padding_after[3];  // average: counted as part of the input
  bool counts_padding;       // average: zeros of the padding count as values
  int64_t divisor;           // average: instead of the number of values; 0: none given
  void* out;                 // [images, positions, channels], contiguous
};

using PoolFn = void(const PoolCall& call);

}  // namespace xopt
