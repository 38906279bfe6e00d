// The norm over rows on a device, which linear_norm ends with as well.
#pragma once

#include "kernels/norm.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {

// `sum_dtype`: of call.sum, if that is given.
void launch_norm(Stream& stream, const NormCall& call, DType sum_dtype);

}  // namespace xopt::sycl_device
