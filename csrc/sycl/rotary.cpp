// Kernel "rotary" on a device. See kernels/rotary.h and device/rotary.sycl.
#include "kernels/rotary.h"

#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 128;

void rotary(const RotaryCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("rotary", "", [&] { return lane_options(stream.lanes()); });
  for (int32_t which = 0; which < 2; ++which) {
    const int64_t columns = call.rotated / 2 + (call.depth - call.rotated);
    const int64_t items = call.batch * call.tensors[which].heads * call.positions * columns;
    if (items == 0) continue;
    stream.launch_items(kernel, items, kItemsOfAGroup, call, which);
  }
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(rotary, f32, rotary);

}  // namespace
}  // namespace xopt::sycl_device
