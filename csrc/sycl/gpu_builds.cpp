// Every build that a GPU with matrix units would ask for; see stream.h.
#include "sycl/product.h"

namespace xopt::sycl_device {

std::vector<Build> gpu_builds(const TileShape& tile) {
  constexpr bool kMatrix = true, kCpu = false;
  constexpr int64_t kLocalBytes = 48 << 10;
  std::vector<Build> builds;
  for (const DType dtype : {DType::bf16, DType::f16, DType::s8, DType::u8}) {
    const Tiling tiling = Tiling::of(dtype, tile, kMatrix, kCpu);
    builds.push_back({"gemm.sycl", product_options(tiling, dtype)});
    if (dtype == DType::s8 || dtype == DType::u8) continue;
    builds.push_back({"gemm_weight_only.sycl", product_options(tiling, dtype)});
    builds.push_back({"conv.sycl", product_options(tiling, dtype)});
    builds.push_back({"attention.sycl", attention_options(tiling, dtype, kLocalBytes)});
  }
  builds.push_back({"gemv_weight_only.sycl", gemv_options(tile.n, kGpuSplits)});
  for (const char* source : {"norm.sycl", "softmax.sycl", "rotary.sycl", "conv_depthwise.sycl", "batch_norm.sycl",
                             "group_norm.sycl", "pointwise.sycl", "pool.sycl", "upsample.sycl"})
    builds.push_back({source, lane_options(tile.n)});
  return builds;
}

}  // namespace xopt::sycl_device
