// xopt::conv_transpose_pack and conv_transpose_unpack: between the weight of a transposed convolution,
// [in, out / groups, kernel...], and packed bytes, a matrix for each phase.
#include "ops/conv_phases.h"
#include "ops/gemm_arguments.h"

namespace xopt::ops {
namespace {

struct PackArguments {
  explicit PackArguments(Stack stack)
      : weight(stack.tensor()),
        groups(stack.integer()),
        stride(stack.integers()),
        dilation(stack.integers()),
        dtype(stack.dtype_code()) {}

  Tensor weight;
  int64_t groups;
  Integers stride, dilation;
  int32_t dtype;
};

void conv_transpose_pack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_transpose_pack";
  const PackArguments arguments{Stack(stack)};
  const Tensor& weight = arguments.weight;
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  const Checked checked{kOp, "weight", weight};
  checked.cpu();
  const DType source = checked.dtype(kFloating);
  const ConvPhases phases =
      conv_phases(kOp, "weight", weight.shape(), arguments.groups, arguments.stride, arguments.dilation);
  const std::vector<int64_t> offsets = phase_offsets(kOp, phases, dtype);
  Tensor packed = Tensor::packed_bytes(offsets.back());
  auto* bytes = static_cast<uint8_t*>(packed.mutable_data());
  for (size_t i = 0; i < phases.phases.size(); ++i) {
    const ConvPhase& phase = phases.phases[i];
    pack_conv_matrix(kOp, phase.layout, phase_weight(phases, phase, weight.data(), source, weight.strides()),
                     conv_header(kOp, phase.layout, dtype), bytes + offsets[i]);
  }
  return_tensor(stack, 0, std::move(packed));
}

struct UnpackArguments {
  explicit UnpackArguments(Stack stack)
      : packed(stack.tensor()),
        weight_size(stack.integers()),
        groups(stack.integer()),
        stride(stack.integers()),
        dilation(stack.integers()),
        dtype(stack.dtype_code()) {}

  Tensor packed;
  Integers weight_size;
  int64_t groups;
  Integers stride, dilation;
  int32_t dtype;
};

void conv_transpose_unpack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_transpose_unpack";
  const UnpackArguments arguments{Stack(stack)};
  const Integers& sizes = arguments.weight_size;
  const ConvPhases phases =
      conv_phases(kOp, "weight_size", sizes.view(), arguments.groups, arguments.stride, arguments.dilation);
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  const DType packed_dtype = packed_phases_dtype(kOp, arguments.packed, phases);
  if (packed_dtype != dtype) {
    fail(kOp, "dtype", "expected ", torch_dtype_name(dtype_to_torch(packed_dtype)), ", the packed weight's, got ",
         torch_dtype_name(arguments.dtype));
  }
  const std::vector<int64_t> offsets = phase_offsets(kOp, phases, dtype);
  const auto* bytes = static_cast<const uint8_t*>(arguments.packed.data());
  Tensor weight = Tensor::empty_weight(sizes.data(), sizes.size(), dtype);
  for (size_t i = 0; i < phases.phases.size(); ++i) {
    const ConvPhase& phase = phases.phases[i];
    unpack_conv_matrix(kOp, phase.layout, bytes + offsets[i],
                       phase_weight(phases, phase, weight.mutable_data(), dtype, weight.strides()));
  }
  return_tensor(stack, 0, std::move(weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "conv_transpose_pack(Tensor weight, int groups=1, *, int[] stride, int[] dilation, ScalarType dtype) -> Tensor");
  library.def(
      "conv_transpose_unpack(Tensor packed, int[] weight_size, int groups, int[] stride, int[] dilation, "
      "ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("conv_transpose_pack", &conv_transpose_pack);
  library.impl("conv_transpose_unpack", &conv_transpose_unpack);
}

}  // namespace xopt::ops
