// Kernels whose sub-groups have a row each, and the norm over rows on a device, which linear_norm ends with as well.
#pragma once

#include "kernels/norm.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {

inline sycl::nd_range<3> row_range(const Stream& stream, int64_t rows) {
  constexpr int kRowsOfAGroup = 4;
  const int rows_of_a_group = stream.is_cpu() ? 1 : kRowsOfAGroup;
  const auto groups = static_cast<size_t>(ceil_div(rows, rows_of_a_group));
  const size_t items = static_cast<size_t>(rows_of_a_group) * static_cast<size_t>(stream.lanes());
  return {{1, 1, groups * items}, {1, 1, items}};
}

void launch_norm(Stream& stream, const NormCall& call);

}  // namespace xopt::sycl_device
