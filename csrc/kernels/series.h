// Values over steps of time, as scans and causal convolutions take them.
#pragma once

#include "tiles/types.h"

namespace xopt {

// [batch, steps, columns]
struct Series {
  const void* data;
  DType dtype;
  int64_t batch_stride, step_stride, column_stride;
};

}  // namespace xopt
