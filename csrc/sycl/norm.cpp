// Kernel "norm" on a device. See kernels/norm.h and device/norm.sycl.
#include "sycl/norm_rows.h"

namespace xopt::sycl_device {
namespace {

constexpr int kRowsOfAGroup = 4;

void norm(const NormCall& call) {
  Stream& stream = Stream::current();
  launch_norm(stream, call, call.input.dtype);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(norm, f32, norm);

}  // namespace

void launch_norm(Stream& stream, const NormCall& call, DType sum_dtype) {
  const int lanes = stream.lanes(), rows = stream.is_cpu() ? 1 : kRowsOfAGroup;
  sycl::kernel& kernel = stream.kernel("norm", "", [&] { return lane_options(lanes); });
  const auto groups = static_cast<size_t>(ceil_div(call.rows, rows));
  const auto items = static_cast<size_t>(rows * lanes);
  stream.launch(kernel, {{1, 1, groups * items}, {1, 1, items}}, call, static_cast<int32_t>(sum_dtype));
}

}  // namespace xopt::sycl_device
