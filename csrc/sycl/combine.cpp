// Kernel "combine" on a device. See kernels/combine.h and device/combine.sycl.
#include "kernels/combine.h"

#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 128;

void combine(const CombineCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("combine", "", [&] { return lane_options(stream.lanes()); });
  int64_t items = 1;
  for (const int64_t size : call.size) items *= size;
  stream.launch_items(kernel, items, kItemsOfAGroup, call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(combine, f32, combine);

}  // namespace
}  // namespace xopt::sycl_device
