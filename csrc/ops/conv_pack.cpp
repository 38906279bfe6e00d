// xopt::conv_pack and conv_unpack with their int8 forms: between the weight of a convolution, [out, in / groups,
// kernel...], and packed bytes.
#include <algorithm>

#include "ops/conv_matrix.h"
#include "ops/gemm_arguments.h"
#include "ops/quantization.h"

namespace xopt::ops {
namespace {

ConvWeightView weight_view(const ConvLayout& layout, const void* data, DType dtype, const int64_t* strides) {
  ConvWeightView view{data, dtype, layout.group_out() * strides[0], strides[0], strides[1], {0, 0, 0}};
  for (int64_t i = 0; i < layout.dims; ++i) view.kernel[3 - layout.dims + i] = strides[2 + i];
  return view;
}

ConvLayout layout_of(const char* op, const Tensor& weight, int64_t groups) {
  return conv_layout(op, "weight", weight.shape(), groups);
}

Tensor packed_bytes(const char* op, const ConvLayout& layout, const Tensor& weight, DType source,
                    const PackedHeader& header, const ConvChannels& channels = {}) {
  Tensor packed = Tensor::packed_bytes(header.bytes);
  const ConvWeightView view = weight_view(layout, weight.data(), source, weight.strides());
  pack_conv_matrix(op, layout, view, header, packed.mutable_data(), channels);
  return packed;
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
  const ConvLayout layout = layout_of(kOp, weight, groups);
  return_tensor(stack, 0, packed_bytes(kOp, layout, weight, source, conv_header(kOp, layout, dtype)));
}

void conv_pack_int8(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_pack_int8";
  Stack arguments(stack);
  const Tensor weight(arguments.tensor());
  const Tensor scale(arguments.tensor());
  const Tensor zero_point(arguments.optional_tensor());
  const int64_t groups = arguments.integer();
  const Checked checked{kOp, "weight", weight};
  checked.cpu();
  const DType source = checked.dtype({DType::s8});
  const ConvLayout layout = layout_of(kOp, weight, groups);
  ConvChannels channels{column_parameter<float>(kOp, "scale", scale, DType::f32, layout.out), {}};
  if (zero_point) {
    channels.zero_point = column_parameter<int32_t>(kOp, "zero_point", zero_point, DType::s32, layout.out);
  }
  for (const int32_t value : channels.zero_point) {
    if (value < -128 || value > 127) fail(kOp, "zero_point", "expected -128 to 127, values of the weight, got ", value);
  }
  const PackedHeader header = conv_header(kOp, layout, DType::s8, !channels.zero_point.empty());
  return_tensor(stack, 0, packed_bytes(kOp, layout, weight, source, header, channels));
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
  const ConvLayout layout = conv_layout(kOp, "weight_size", sizes.view(), arguments.groups);
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

struct UnpackInt8Arguments {
  explicit UnpackInt8Arguments(Stack stack)
      : packed(stack.tensor()), weight_size(stack.integers()), groups(stack.integer()) {}

  Tensor packed;
  Integers weight_size;
  int64_t groups;
};

template <class Value>
Tensor vector_of(const std::vector<Value>& values, DType dtype) {
  const auto size = static_cast<int64_t>(values.size());
  Tensor tensor = Tensor::empty(&size, 1, dtype);
  std::copy(values.begin(), values.end(), static_cast<Value*>(tensor.mutable_data()));
  return tensor;
}

void conv_unpack_int8(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_unpack_int8";
  const UnpackInt8Arguments arguments{Stack(stack)};
  const Integers& sizes = arguments.weight_size;
  const ConvLayout layout = conv_layout(kOp, "weight_size", sizes.view(), arguments.groups);
  check_conv_packed(kOp, packed_header(kOp, arguments.packed), layout, true);

  Tensor weight = Tensor::empty_weight(sizes.data(), sizes.size(), DType::s8);
  ConvChannels channels;
  unpack_conv_matrix(kOp, layout, arguments.packed.data(),
                     weight_view(layout, weight.mutable_data(), DType::s8, weight.strides()), &channels);
  return_tensor(stack, 0, std::move(weight));
  return_tensor(stack, 1, vector_of(channels.scale, DType::f32));
  return_tensor(stack, 2, vector_of(channels.zero_point, DType::s32));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("conv_pack(Tensor weight, int groups=1, *, ScalarType dtype) -> Tensor");
  library.def("conv_unpack(Tensor packed, int[] weight_size, int groups, ScalarType dtype) -> Tensor");
  library.def("conv_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None, int groups=1) -> Tensor");
  library.def(
      "conv_unpack_int8(Tensor packed, int[] weight_size, int groups) "
      "-> (Tensor weight, Tensor scale, Tensor zero_point)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("conv_pack", &conv_pack);
  library.impl("conv_unpack", &conv_unpack);
  library.impl("conv_pack_int8", &conv_pack_int8);
  library.impl("conv_unpack_int8", &conv_unpack_int8);
}
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("conv_pack", &on_host<conv_pack, 'T'>);
  library.impl("conv_unpack", &on_host<conv_unpack, 'T'>);
  library.impl("conv_pack_int8", &on_host<conv_pack_int8, 'T', 'T', 'O'>);
  library.impl("conv_unpack_int8", &on_host<conv_unpack_int8, 'T'>);
}

}  // namespace xopt::ops
