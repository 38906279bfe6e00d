// xopt::packed_rows: rows of a packed weight by their indices, as an embedding takes them of its table.
#include "kernels/packed_rows.h"

#include <vector>

#include "ops/gemm_arguments.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "packed_rows";

// Where the element of this number, in row-major order, lies in a tensor of any strides.
int64_t offset_of(const Tensor& tensor, int64_t number) {
  int64_t offset = 0;
  for (int64_t dim = tensor.dims() - 1; dim >= 0; --dim) {
    offset += number % tensor.size(dim) * tensor.stride(dim);
    number /= tensor.size(dim);
  }
  return offset;
}

template <class Index>
std::vector<int64_t> checked_indices(const Tensor& indices, int64_t rows) {
  const auto* values = static_cast<const Index*>(indices.data());
  std::vector<int64_t> checked(static_cast<size_t>(indices.numel()));
  int64_t number = 0;
  for (int64_t& index : checked) {
    index = values[offset_of(indices, number++)];
    if (index < 0 || index >= rows) fail(kOp, "indices", "expected values in [0, ", rows, "), got ", index);
  }
  return checked;
}

void packed_rows(StableIValue* stack, uint64_t, uint64_t) {
  Stack arguments(stack);
  const Tensor packed(arguments.tensor());
  const Tensor indices(arguments.tensor());
  const int64_t out_features = arguments.integer(), in_features = arguments.integer();
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype_code(), kFloating);

  const PackedHeader header = packed_header(kOp, packed);
  if (header.gated != 0) fail(kOp, "packed", "expected a single weight, got a gated pair");
  if (header.dtype != dtype) {
    fail(kOp, "dtype", "expected ", torch_dtype_name(dtype_to_torch(header.dtype)), ", the packed weight's, got ",
         torch_dtype_name(dtype_to_torch(dtype)));
  }
  if (header.n != out_features) fail(kOp, "out_features", "expected ", header.n, ", got ", out_features);
  if (header.k != in_features) fail(kOp, "in_features", "expected ", header.k, ", got ", in_features);
  Checked{kOp, "indices", indices}.cpu();
  if (Offload* offload = current_offload()) offload->find(kOp, "f32");  // it has none, and keeps count
  const bool wide = indices.dtype_code() == aoti_torch_dtype_int64();
  if (!wide && indices.dtype_code() != torch_codes().s32) {
    fail(kOp, "indices", "expected dtype int64 or int32, got ", torch_dtype_name(indices.dtype_code()));
  }
  const std::vector<int64_t> rows =
      wide ? checked_indices<int64_t>(indices, header.n) : checked_indices<int32_t>(indices, header.n);

  std::vector<int64_t> sizes(indices.sizes(), indices.sizes() + indices.dims());
  sizes.push_back(header.k);
  Tensor out = Tensor::empty(sizes.data(), static_cast<int64_t>(sizes.size()), dtype);
  xopt::packed_rows({packed.data(), rows.data(), static_cast<int64_t>(rows.size()), out.mutable_data()});
  return_tensor(stack, 0, std::move(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "packed_rows(Tensor packed, Tensor indices, int out_features, int in_features, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("packed_rows", &packed_rows); }

}  // namespace xopt::ops
