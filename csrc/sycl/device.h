// SYCL devices: which there are, what they can do, and the shapes that kernels are built for on one of them.
#pragma once

#include <string>
#include <sycl/sycl.hpp>
#include <vector>

#include "tiles/types.h"

namespace xopt::sycl_device {

struct MatrixShape {
  DType a, b;
  int m, n, k;
  bool at_most;  // smaller tiles will do as well
};

struct DeviceFacts {
  std::string name, type, backend, driver;
  std::vector<size_t> sub_group_sizes;
  std::vector<MatrixShape> matrix_shapes;  // those that kernels of ours can use; none: there are no matrix units
  bool usm_device, usm_shared, usm_system;
  int64_t local_bytes, work_group_size, compute_units;
};

// The tile that a kernel is built for. Without matrix units the plain loops run it.
struct TileShape {
  int m, n, k;
};

// Sets what the runtime reads from the environment when it starts, where the user has not: the OpenCL driver's path
// (empty: it is left to the system), and the CPU to compile for. Has to come before anything else; does nothing later.
void prepare_runtime(const std::string& opencl_driver);

// The runtime is in use from now on: a process that is forked later cannot use it.
void mark_started();

// Throws in a process that was forked after the runtime had started.
void require_usable();

// All devices, in the order of their numbers.
const std::vector<sycl::device>& all_devices();
DeviceFacts facts_of(const sycl::device& device);

const char* dtype_name(DType dtype);

}  // namespace xopt::sycl_device
