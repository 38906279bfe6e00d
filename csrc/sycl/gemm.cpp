// Kernels "gemm" and "conv" on a device. See kernels/gemm.h, kernels/conv.h and device/product.h.
#include "kernels/conv.h"
#include "sycl/norm_rows.h"

namespace xopt::sycl_device {
namespace {

constexpr int kChunk = 512;  // values of a row of A in local memory at once

// `dtype`: of A, as the product takes it.
template <class Call>
void launch_product(Stream& stream, const char* name, DType dtype, const Call& call, int64_t rows, int64_t panels,
                    int64_t products) {
  const Tiling& tiling = stream.tiling(dtype);
  sycl::kernel& kernel = stream.kernel(name, dtype_name(dtype), [&] {
    Options options = tiling.options();
    options.push_back(std::string("-DXOPT_DTYPE_") + dtype_name(dtype));
    options.push_back("-DXOPT_CHUNK=" + std::to_string(kChunk));
    return options;
  });
  const auto items = static_cast<size_t>(tiling.lanes * tiling.sub_groups);
  const auto across = static_cast<size_t>(ceil_div(panels, tiling.sub_groups));
  const auto down = static_cast<size_t>(ceil_div(rows, tiling.rows()));
  const OutPositions* apart = call.epilogue.positions;
  stream.launch(kernel, {{static_cast<size_t>(products), down, across * items}, {1, 1, items}}, call,
                apart == nullptr ? OutPositions{} : *apart);
}

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
  NormCall after{};
  after.norm = e.norm;
  after.rows = call.m;
  after.columns = n;
  after.input = {before.epilogue.out, DType::f32, call.m, n, 0};
  after.weight = e.norm_weight;
  after.bias = e.norm_bias;
  after.eps = e.norm_eps;
  after.out = e.out;
  after.out_dtype = e.out_dtype;
  after.sum = e.sum;
  launch_norm(stream, after, e.out_dtype);
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

// ---- Convolutions --------------------------------------------------------------------------------------------------

void convolution(DType dtype, const ConvCall& call) {
  Stream& stream = Stream::current();
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

}  // namespace
}  // namespace xopt::sycl_device
