// Kernels "batch_norm", "group_norm", "pool" and "upsample" on a device. See their headers in kernels/ and sources in device/.
#include "kernels/batch_norm.h"
#include "kernels/conv.h"
#include "kernels/group_norm.h"
#include "kernels/pool.h"
#include "kernels/upsample.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

constexpr int64_t kItemsOfAGroup = 256;  // on a GPU; all channels of a group wait for each other

void group_norm(const GroupNormCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("group_norm", "", [&] { return lane_options(stream.lanes()); });
  const auto items = static_cast<size_t>(stream.is_cpu() ? stream.lanes() : kItemsOfAGroup);
  const auto images = static_cast<size_t>(call.images), groups = static_cast<size_t>(call.groups);
  stream.launch(kernel, {{1, images, groups * items}, {1, 1, items}}, call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(group_norm, f32, group_norm);

void batch_norm(const BatchNormCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("batch_norm", "", [&] { return lane_options(stream.lanes()); });
  const int64_t items = call.rows * call.channels;
  stream.launch_items(kernel, items, kItemsOfAGroup, call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(batch_norm, f32, batch_norm);

// A work-item to each channel of each output position.
sycl::nd_range<3> channel_range(const PatchesView& view, int64_t images) {
  const auto channels = static_cast<size_t>(round_up(view.channels, kTileColumns));
  return {{1, static_cast<size_t>(images * output_positions(view)), channels}, {1, 1, size_t{kTileColumns}}};
}

void pool(const PoolCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("pool", "", [&] { return lane_options(stream.lanes()); });
  stream.launch(kernel, channel_range(call.input, call.images), call);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(pool, f32, pool);

void upsample(const UpsampleCall& call) {
  Stream& stream = Stream::current();
  sycl::kernel& kernel = stream.kernel("upsample", "", [&] { return lane_options(stream.lanes()); });
  UpsampleCall on_device = call;
  for (int i = 0; i < 3; ++i) {
    const auto bytes = static_cast<size_t>(call.input.out[i]) * sizeof(Between);
    on_device.places[i] = static_cast<const Between*>(stream.keep(call.places[i], bytes));
  }
  stream.launch(kernel, channel_range(call.input, call.images), on_device);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(upsample, f32, upsample);

}  // namespace
}  // namespace xopt::sycl_device
