// Rows of A that lie in memory as RowsView says (tiles/types.h), on their way into local memory.
#pragma once

#include "sycl/device/product.h"

namespace xopt::device {

struct MergedRows {
  RowsView view;
  int64_t k;
  void stage(int64_t row, int64_t first, int padded, int item, Staged* to) const {
    const int count = static_cast<int>(k - first < padded ? k - first : padded);
    const int64_t from = row / view.inner_rows * view.outer_stride + row % view.inner_rows * view.row_stride + first;
    stage_run(view.data, view.dtype, from, count, item, to);
    stage_zeros(count, padded, item, to);
  }
};

}  // namespace xopt::device
