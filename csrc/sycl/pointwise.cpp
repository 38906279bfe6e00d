// Kernel "pointwise" on a device. See kernels/pointwise.h and device/pointwise.sycl.
#include "kernels/pointwise.h"

#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 128;

void pointwise(const PointwiseCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("pointwise", "", [&] { return lane_options(stream.lanes()); });
  int64_t items = 1;
  for (const int64_t size : call.size) items *= size;
  stream.launch_items(kernel, items, kItemsOfAGroup, call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(pointwise, f32, pointwise);

}  // namespace
}  // namespace xopt::sycl_device
