// xopt::linear_pack and linear_unpack with their gated and int8 forms: from a weight to packed bytes and back.
//
// Packed bytes lie in memory of weight_alloc (2 MB pages) and are a plain uint8 tensor: it can be saved, copied and
// shared like any other, and describes itself (csrc/kernels/packed.h).
#include "ops/gemm_arguments.h"
#include "ops/quantization.h"

namespace xopt::ops {
namespace {

MatrixView matrix_view(const char* op, const char* name, const Tensor& weight, std::initializer_list<DType> dtypes) {
  const Checked checked{op, name, weight};
  checked.cpu();
  const DType dtype = checked.dtype(dtypes);
  if (weight.dims() != 2) {
    checked.fail("expected two dimensions [out_features, in_features], got shape ", weight.shape_text());
  }
  return {weight.data(), dtype, weight.stride(0), weight.stride(1)};
}

// Fills in the header, allocates and packs.
Tensor packed_bytes(const char* op, DType dtype, int64_t n, int64_t k, bool gated, PackCall* call) {
  if (!packed_header_init(&call->header, dtype, n, k, gated, call->zero_point != nullptr)) {
    fail(op, "weight", "packed, its shape [", n, ", ", k, "] is more than fits in memory");
  }
  Tensor packed = Tensor::packed_bytes(call->header.bytes);
  call->packed = packed.mutable_data();
  pack_weight(*call);
  return packed;
}

// ---- Packing -------------------------------------------------------------------------------------------------------

void linear_pack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_pack";
  Stack arguments(stack);
  const Tensor weight(arguments.tensor());
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype_code(), kFloating);

  PackCall call{};
  call.weight = matrix_view(kOp, "weight", weight, kFloating);
  return_tensor(stack, 0, packed_bytes(kOp, dtype, weight.size(0), weight.size(1), false, &call));
}

void linear_pack_gated(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_pack_gated";
  Stack arguments(stack);
  const Tensor gate(arguments.tensor());
  const Tensor up(arguments.tensor());
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype_code(), kFloating);

  PackCall call{};
  call.weight = matrix_view(kOp, "gate", gate, kFloating);
  call.up = matrix_view(kOp, "up", up, kFloating);
  Checked{kOp, "up", up}.shape({gate.size(0), gate.size(1)});
  return_tensor(stack, 0, packed_bytes(kOp, dtype, gate.size(0), gate.size(1), true, &call));
}

void linear_pack_int8(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_pack_int8";
  Stack arguments(stack);
  const Tensor weight(arguments.tensor());
  const Tensor scale(arguments.tensor());
  const Tensor zero_point(arguments.optional_tensor());

  PackCall call{};
  call.weight = matrix_view(kOp, "weight", weight, {DType::s8});
  const int64_t n = weight.size(0);
  const auto scales = column_parameter<float>(kOp, "scale", scale, DType::f32, n);
  std::vector<int32_t> zero_points;
  if (zero_point) zero_points = column_parameter<int32_t>(kOp, "zero_point", zero_point, DType::s32, n);
  constexpr int32_t kNoZeroPoint = 0;
  call.scale = scales.data();
  if (zero_point) call.zero_point = zero_points.empty() ? &kNoZeroPoint : zero_points.data();
  return_tensor(stack, 0, packed_bytes(kOp, DType::s8, n, weight.size(1), false, &call));
}

// ---- Unpacking -----------------------------------------------------------------------------------------------------

// The header of `packed`, after it was found to be what the caller says.
PackedHeader expected_header(const char* op, const Tensor& packed, DType dtype, bool gated, int64_t out_features,
                             int64_t in_features) {
  const PackedHeader header = packed_header(op, packed);
  if (header.dtype != dtype) {
    fail(op, dtype == DType::s8 ? "packed" : "dtype", "expected ", torch_dtype_name(dtype_to_torch(header.dtype)),
         ", the packed weight's, got ", torch_dtype_name(dtype_to_torch(dtype)));
  }
  if ((header.gated != 0) != gated) {
    fail(op, "packed", "expected ", gated ? "a gated pair of weights" : "a single weight", ", got ",
         gated ? "a single one" : "a gated pair");
  }
  const auto check_size = [&](const char* name, int64_t expected, int64_t got) {
    if (expected != got) fail(op, name, "expected ", expected, ", the packed weight's, got ", got);
  };
  check_size("out_features", header.n, out_features);
  check_size("in_features", header.k, in_features);
  return header;
}

Tensor empty_matrix(const PackedHeader& header) {
  const int64_t sizes[2] = {header.n, header.k};
  return Tensor::empty_weight(sizes, 2, header.dtype);
}

struct UnpackArguments {
  UnpackArguments(Stack stack, bool has_dtype)
      : packed(stack.tensor()),
        out_features(stack.integer()),
        in_features(stack.integer()),
        dtype(has_dtype ? stack.dtype_code() : 0) {}

  Tensor packed;
  int64_t out_features, in_features;
  int32_t dtype;
};

void linear_unpack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_unpack";
  const UnpackArguments arguments{Stack(stack), true};
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  const PackedHeader header =
      expected_header(kOp, arguments.packed, dtype, false, arguments.out_features, arguments.in_features);

  Tensor weight = empty_matrix(header);
  unpack_weight({arguments.packed.data(), weight.mutable_data(), nullptr, nullptr, nullptr});
  return_tensor(stack, 0, std::move(weight));
}

void linear_unpack_gated(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_unpack_gated";
  const UnpackArguments arguments{Stack(stack), true};
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  const PackedHeader header =
      expected_header(kOp, arguments.packed, dtype, true, arguments.out_features, arguments.in_features);

  Tensor gate = empty_matrix(header);
  Tensor up = empty_matrix(header);
  unpack_weight({arguments.packed.data(), gate.mutable_data(), up.mutable_data(), nullptr, nullptr});
  return_tensor(stack, 0, std::move(gate));
  return_tensor(stack, 1, std::move(up));
}

void linear_unpack_int8(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_unpack_int8";
  const UnpackArguments arguments{Stack(stack), false};
  const PackedHeader header =
      expected_header(kOp, arguments.packed, DType::s8, false, arguments.out_features, arguments.in_features);

  Tensor weight = empty_matrix(header);
  Tensor scale = Tensor::empty(&header.n, 1, DType::f32);
  Tensor zero_point = Tensor::empty(&header.n, 1, DType::s32);
  unpack_weight({arguments.packed.data(), weight.mutable_data(), nullptr, static_cast<float*>(scale.mutable_data()),
                 static_cast<int32_t*>(zero_point.mutable_data())});
  return_tensor(stack, 0, std::move(weight));
  return_tensor(stack, 1, std::move(scale));
  return_tensor(stack, 2, std::move(zero_point));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("linear_pack(Tensor weight, *, ScalarType dtype) -> Tensor");
  library.def("linear_pack_gated(Tensor gate, Tensor up, *, ScalarType dtype) -> Tensor");
  library.def("linear_pack_int8(Tensor weight, Tensor scale, Tensor? zero_point=None) -> Tensor");
  library.def("linear_unpack(Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor");
  library.def(
      "linear_unpack_gated(Tensor packed, int out_features, int in_features, ScalarType dtype) "
      "-> (Tensor gate, Tensor up)");
  library.def(
      "linear_unpack_int8(Tensor packed, int out_features, int in_features) "
      "-> (Tensor weight, Tensor scale, Tensor zero_point)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("linear_pack", &linear_pack);
  library.impl("linear_pack_gated", &linear_pack_gated);
  library.impl("linear_pack_int8", &linear_pack_int8);
  library.impl("linear_unpack", &linear_unpack);
  library.impl("linear_unpack_gated", &linear_unpack_gated);
  library.impl("linear_unpack_int8", &linear_unpack_int8);
}
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("linear_pack", &on_host<linear_pack, 'T', '.'>);
  library.impl("linear_pack_gated", &on_host<linear_pack_gated, 'T', 'T', '.'>);
  library.impl("linear_pack_int8", &on_host<linear_pack_int8, 'T', 'T', 'O'>);
  library.impl("linear_unpack", &on_host<linear_unpack, 'T'>);
  library.impl("linear_unpack_gated", &on_host<linear_unpack_gated, 'T'>);
  library.impl("linear_unpack_int8", &on_host<linear_unpack_int8, 'T'>);
}

}  // namespace xopt::ops
