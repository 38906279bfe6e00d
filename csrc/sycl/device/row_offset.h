// Where a row of a matrix begins.
#pragma once

#include "tiles/types.h"

namespace xopt::device {

inline int64_t row_offset(const RowsView& view, int64_t row) {
  return row / view.inner_rows * view.outer_stride + row % view.inner_rows * view.row_stride;
}

}  // namespace xopt::device
