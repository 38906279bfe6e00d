// Kernel "gemm" on a device. See kernels/gemm.h and device/gemm.sycl.
#include "sycl/product.h"
#include "sycl/rows.h"

namespace xopt::sycl_device {
namespace {

void product(DType dtype, const GemmCall& call) {
  Stream& stream = Stream::current();
  const Epilogue& e = call.epilogue;
  const int64_t n = call.weight.n, panels = call.weight.panels;
  if (e.norm == Norm::none) {
    launch_product(stream, "gemm", dtype, call, call.m, panels, 1);
    return stream.finish();
  }
  GemmCall before = call;
  before.epilogue.out = stream.scratch(call.m * n * static_cast<int64_t>(sizeof(float)));
  before.epilogue.out_dtype = DType::f32;
  before.epilogue.out_row_stride = n;
  launch_product(stream, "gemm", dtype, before, call.m, panels, 1);
  launch_norm(stream, norm_after(call, static_cast<const float*>(before.epilogue.out), 0, call.m));
  stream.finish();
}

void gemm_f32(const GemmCall& call) { product(DType::f32, call); }
void gemm_bf16(const GemmCall& call) { product(DType::bf16, call); }
void gemm_f16(const GemmCall& call) { product(DType::f16, call); }
void gemm_s8s8(const GemmCall& call) { product(DType::s8, call); }
void gemm_u8s8(const GemmCall& call) { product(DType::u8, call); }

XOPT_REGISTER_SYCL_KERNEL(gemm, f32, gemm_f32);
XOPT_REGISTER_SYCL_KERNEL(gemm, bf16, gemm_bf16);
XOPT_REGISTER_SYCL_KERNEL(gemm, f16, gemm_f16);
XOPT_REGISTER_SYCL_KERNEL(gemm, s8s8, gemm_s8s8);
XOPT_REGISTER_SYCL_KERNEL(gemm, u8s8, gemm_u8s8);

}  // namespace
}  // namespace xopt::sycl_device
