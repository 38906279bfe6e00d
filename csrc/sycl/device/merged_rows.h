// Rows of A that lie in memory as RowsView says (tiles/types.h), on their way into local memory.
#pragma once

#include "sycl/device/product.h"
#include "sycl/device/row_offset.h"

namespace xopt::device {

struct MergedRows {
  RowsView view;
  int64_t k;
  void stage(int64_t row, int64_t first, int padded, int item, Staged* to) const {
    const int count = static_cast<int>(k - first < padded ? k - first : padded);
    stage_run(view.data, view.dtype, row_offset(view, row) + first, count, item, to);
    stage_zeros(count, padded, item, to);
  }
};

}  // namespace xopt::device
