// xopt::conv_pack and conv_unpack: between the weight of a convolution, [out, in / groups, kernel...], and packed bytes.
#include "ops/conv_matrix.h"
#include "ops/gemm_arguments.h"
#include "runtime/arena.h"

namespace xopt::ops {
namespace {

ConvWeightView weight_view(const ConvLayout& layout, const void* data, DType dtype, const int64_t* strides) {
  ConvWeightView view{data, dtype, layout.group_out() * strides[0], strides[0], strides[1], {0, 0, 0}};
  for (int64_t i = 0; i < layout.dims; ++i) view.kernel[3 - layout.dims + i] = strides[2 + i];
  return view;
}

void conv_pack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_pack";
  Stack arguments(stack);
  const Tensor weight(arguments.tensor());
  const int64_t groups = arguments.integer();
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype_code(), kFloating);
  const Checked checked{kOp, "weight", weight};
  checked.cpu();
  const DType source = checked.dtype(kFloating);
  const ConvLayout layout = conv_layout(kOp, "weight", weight.sizes(), weight.dims(), weight.shape_text(), groups);

  const PackedHeader header = conv_header(kOp, layout, dtype);
  void* bytes = weight_alloc(static_cast<size_t>(header.bytes));
  Tensor packed = Tensor::adopt_bytes(bytes, header.bytes, [](void* data, void*) { weight_free(data); });
  pack_conv_matrix(kOp, layout, weight_view(layout, weight.data(), source, weight.strides()), header, bytes);
  return_tensor(stack, 0, std::move(packed));
}

struct UnpackArguments {
  explicit UnpackArguments(Stack stack)
      : packed(stack.tensor()), weight_size(stack.integers()), groups(stack.integer()), dtype(stack.dtype_code()) {}

  Tensor packed;
  Integers weight_size;
  int64_t groups;
  int32_t dtype;
};

void conv_unpack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_unpack";
  const UnpackArguments arguments{Stack(stack)};
  const Integers& sizes = arguments.weight_size;
  const ConvLayout layout = conv_layout(kOp, "weight_size", sizes.data(), sizes.size(), sizes.text(), arguments.groups);
  const PackedHeader header = packed_header(kOp, arguments.packed);
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  if (header.dtype != dtype) {
    fail(kOp, "dtype", "expected ", torch_dtype_name(dtype_to_torch(header.dtype)), ", the packed weight's, got ",
         torch_dtype_name(arguments.dtype));
  }
  check_conv_packed(kOp, header, layout);

  Tensor weight = Tensor::empty_weight(sizes.data(), sizes.size(), dtype);
  unpack_conv_matrix(kOp, layout, arguments.packed.data(),
                     weight_view(layout, weight.mutable_data(), dtype, weight.strides()));
  return_tensor(stack, 0, std::move(weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("conv_pack(Tensor weight, int groups=1, *, ScalarType dtype) -> Tensor");
  library.def("conv_unpack(Tensor packed, int[] weight_size, int groups, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("conv_pack", &conv_pack);
  library.impl("conv_unpack", &conv_unpack);
}

}  // namespace xopt::ops
