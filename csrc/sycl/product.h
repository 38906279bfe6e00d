// The launch of a product with a packed weight on a device, for "gemm" and "conv". See device/product.h.
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

// `dtype`: of A, as the product takes it.
template <class Call>
void launch_product(Stream& stream, const char* name, DType dtype, const Call& call, int64_t rows, int64_t panels,
                    int64_t products) {
  const Tiling& tiling = stream.tiling(dtype);
  sycl::kernel& kernel = stream.kernel(name, dtype_name(dtype), [&] { return product_options(tiling, dtype); });
  const auto items = static_cast<size_t>(tiling.lanes * tiling.sub_groups);
  const auto across = static_cast<size_t>(ceil_div(panels, tiling.sub_groups));
  const auto down = static_cast<size_t>(ceil_div(rows, tiling.rows()));
  const OutPositions* apart = call.epilogue.positions;
  stream.launch(kernel, {{static_cast<size_t>(products), down, across * items}, {1, 1, items}}, call,
                apart == nullptr ? OutPositions{} : *apart);
}

}  // namespace xopt::sycl_device
