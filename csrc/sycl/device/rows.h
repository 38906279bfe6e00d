// Rows of a matrix, each of which a sub-group has.
#pragma once

#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>
#include <sycl/group_algorithm.hpp>

#include "sycl/device/row_offset.h"
#include "sycl/device/values.h"

namespace syclexp = sycl::ext::oneapi::experimental;

namespace xopt::device {

inline auto sub_group_of_row() { return sycl::ext::oneapi::this_work_item::get_sub_group(); }
inline int64_t row_of_sub_group() {
  return static_cast<int64_t>(sycl::ext::oneapi::this_work_item::get_nd_item<3>().get_global_linear_id() / XOPT_SG);
}

}  // namespace xopt::device
