// Kernel "softmax" on a device. See kernels/softmax.h and device/softmax.sycl.
#include "kernels/softmax.h"

#include "sycl/rows.h"

namespace xopt::sycl_device {
namespace {

void softmax(const SoftmaxCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("softmax", "", [&] { return lane_options(stream.lanes()); });
  stream.launch(kernel, row_range(stream, call.rows), call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(softmax, f32, softmax);

}  // namespace
}  // namespace xopt::sycl_device
