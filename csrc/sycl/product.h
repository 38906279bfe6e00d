// The launch of a product with a packed weight on a device, for "gemm", "gemm_weight_only" and "conv". See device/product.h.
#pragma once

#include "kernels/gemm.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {

inline constexpr int kChunk = 512;  // values of a row of A in local memory at once

inline Options product_options(const Tiling& tiling, DType dtype) {
  Options options = tiling.options(dtype);
  options.push_back(build_option("CHUNK", kChunk));
  return options;
}

// Work-groups of neighbouring panels, by blocks of rows, by products.
inline sycl::nd_range<3> product_range(const Tiling& tiling, int64_t rows, int64_t panels, int64_t products) {
  const auto items = static_cast<size_t>(tiling.lanes) * static_cast<size_t>(tiling.sub_groups);
  const auto across = static_cast<size_t>(ceil_div(panels, tiling.sub_groups));
  const auto down = static_cast<size_t>(ceil_div(rows, tiling.rows()));
  return {{static_cast<size_t>(products), down, across * items}, {1, 1, items}};
}

// `dtype`: of A, as the product takes it.
template <class Call>
void launch_product(Stream& stream, const char* name, DType dtype, const Call& call, int64_t rows, int64_t panels,
                    int64_t products) {
  const Tiling& tiling = stream.tiling(dtype);
  sycl::kernel& kernel = stream.kernel(name, dtype_name(dtype), [&] { return product_options(tiling, dtype); });
  const OutPositions* apart = call.epilogue.positions;
  stream.launch(kernel, product_range(tiling, rows, panels, products), call,
                apart == nullptr ? OutPositions{} : *apart);
}

}  // namespace xopt::sycl_device
