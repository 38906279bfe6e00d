// Kernel "concat" on a device. See kernels/concat.h and device/concat.sycl.
#include "kernels/concat.h"

#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 128;

void concat(const ConcatCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("concat", "", [&] { return lane_options(stream.lanes()); });
  for (int32_t which = 0; which < call.count; ++which) {
    const CopiedRuns& part = call.parts[which];
    const int64_t items = part.size[0] * part.size[1] * part.size[2] * (part.run_bytes / call.unit);
    if (items == 0) continue;
    stream.launch_items(kernel, items, kItemsOfAGroup, call, which);
  }
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(concat, f32, concat);

}  // namespace
}  // namespace xopt::sycl_device
