// Kernel "norm" on a device. See kernels/norm.h and device/norm.sycl.
#include "sycl/rows.h"

namespace xopt::sycl_device {
namespace {

void norm(const NormCall& call) {
  Stream& stream = Stream::current();
  launch_norm(stream, call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(norm, f32, norm);

}  // namespace

void launch_norm(Stream& stream, const NormCall& call) {
  sycl::kernel& kernel = stream.kernel("norm", "", [&] { return lane_options(stream.lanes()); });
  stream.launch(kernel, row_range(stream, call.rows), call);
}

}  // namespace xopt::sycl_device
