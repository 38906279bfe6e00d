// Kernel "combine" on a device. See kernels/combine.h and device/combine.sycl.
#include "kernels/combine.h"

#include "sycl/stream.h"
#include "tiles/layout.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 128;

void combine(const CombineCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("combine", "", [&] { return lane_options(stream.lanes()); });
  int64_t items = 1;
  for (const int64_t size : call.size) items *= size;
  const auto rounded = static_cast<size_t>(round_up(items, kItemsOfAGroup));
  stream.launch(kernel, {{1, 1, rounded}, {1, 1, static_cast<size_t>(kItemsOfAGroup)}}, call, items);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(combine, f32, combine);

}  // namespace
}  // namespace xopt::sycl_device
