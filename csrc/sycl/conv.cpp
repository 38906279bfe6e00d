// Kernels "conv" and "conv_depthwise" on a device. See kernels/conv.h, device/conv.sycl and device/conv_depthwise.sycl.
#include "kernels/conv.h"

#include <stdexcept>

#include "sycl/product.h"

namespace xopt::sycl_device {
namespace {

void convolution(DType dtype, const ConvCall& call) {
  Stream& stream = Stream::current();
  if (call.weight.k > INT32_MAX) {
    throw std::runtime_error(
        "xopt::conv: packed: expected at most 2147483647 channels and positions of a kernel in "
        "all on a SYCL device, got " +
        std::to_string(call.weight.k));
  }
  const int64_t rows = call.images * output_positions(call.input);
  if (rows > 0 && call.product_columns > 0 && call.products > 0) {
    launch_product(stream, "conv", dtype, call, rows, ceil_div(call.product_columns, kPanelColumns), call.products);
  }
  stream.finish();
}

void conv_f32(const ConvCall& call) { convolution(DType::f32, call); }
void conv_bf16(const ConvCall& call) { convolution(DType::bf16, call); }
void conv_f16(const ConvCall& call) { convolution(DType::f16, call); }

XOPT_REGISTER_SYCL_KERNEL(conv, f32, conv_f32);
XOPT_REGISTER_SYCL_KERNEL(conv, bf16, conv_bf16);
XOPT_REGISTER_SYCL_KERNEL(conv, f16, conv_f16);

void conv_depthwise(const ConvCall& call) {
  Stream& stream = Stream::current();
  const int64_t rows = call.images * output_positions(call.input);
  if (rows == 0 || call.weight.n == 0) return;
  sycl::kernel& kernel = stream.kernel("conv_depthwise", "", [&] { return lane_options(stream.lanes()); });
  const OutPositions* apart = call.epilogue.positions;
  const auto channels = static_cast<size_t>(round_up(call.weight.n, kPanelColumns));
  const size_t items = kPanelColumns;
  stream.launch(kernel, {{1, static_cast<size_t>(rows), channels}, {1, 1, items}}, call,
                apart == nullptr ? OutPositions{} : *apart);
  stream.finish();
}

XOPT_REGISTER_SYCL_KERNEL(conv_depthwise, f32, conv_depthwise);

}  // namespace
}  // namespace xopt::sycl_device
