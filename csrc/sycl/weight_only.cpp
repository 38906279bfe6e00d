// Kernel "gemm_weight_only" on a device. See kernels/weight_only.h, device/gemm_weight_only.sycl and
// device/gemv_weight_only.sycl.
#include "kernels/weight_only.h"

#include "sycl/product.h"

namespace xopt::sycl_device {
namespace {

void few_rows(Stream& stream, const WeightOnlyCall& call) {
  const int splits = stream.is_cpu() ? 1 : kGpuSplits;
  sycl::kernel& kernel = stream.kernel("gemv_weight_only", "", [&] { return gemv_options(stream.lanes(), splits); });
  const auto items = static_cast<size_t>(kPanelColumns * splits);
  stream.launch(kernel, {{1, 1, static_cast<size_t>(call.codes.panels) * items}, {1, 1, items}}, call);
  stream.finish();
}

void product(DType dtype, const WeightOnlyCall& call) {
  Stream& stream = Stream::current();
  if (call.gemm.m <= kGemvRows) return few_rows(stream, call);
  const Tiling& tiling = stream.tiling(dtype);
  sycl::kernel& kernel =
      stream.kernel("gemm_weight_only", dtype_name(dtype), [&] { return product_options(tiling, dtype); });
  stream.launch(kernel, product_range(tiling, call.gemm.m, call.codes.panels, 1), call, OutPositions{});
  stream.finish();
}

void weight_only_f32(const WeightOnlyCall& call) { product(DType::f32, call); }
void weight_only_bf16(const WeightOnlyCall& call) { product(DType::bf16, call); }
void weight_only_f16(const WeightOnlyCall& call) { product(DType::f16, call); }

XOPT_REGISTER_SYCL_KERNEL(gemm_weight_only, f32, weight_only_f32);
XOPT_REGISTER_SYCL_KERNEL(gemm_weight_only, bf16, weight_only_bf16);
XOPT_REGISTER_SYCL_KERNEL(gemm_weight_only, f16, weight_only_f16);

}  // namespace
}  // namespace xopt::sycl_device
