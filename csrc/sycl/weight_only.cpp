// Kernel "gemm_weight_only" on a device. See kernels/weight_only.h and device/gemm_weight_only.sycl.
#include "kernels/weight_only.h"

#include "sycl/product.h"

namespace xopt::sycl_device {
namespace {

void product(DType dtype, const WeightOnlyCall& call) {
  Stream& stream = Stream::current();
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
