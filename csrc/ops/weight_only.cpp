// xopt::linear_weight_only and the packing of its weights: activations in floats, weights of 8 or 4 bits in groups along
// k, as GPTQ, AWQ and round-to-nearest make them.
#include "kernels/weight_only.h"

#include "ops/gemm_arguments.h"
#include "ops/tuned.h"
#include "ops/xpu_weights.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

// ---- Packing -------------------------------------------------------------------------------------------------------

struct PackArguments {
  explicit PackArguments(Stack stack)
      : weight(stack.tensor()),
        scale(stack.tensor()),
        zero_point(stack.optional_tensor()),
        bits(stack.integer()),
        group_size(stack.integer()),
        gated(stack.boolean()) {}

  Tensor weight, scale, zero_point;
  int64_t bits, group_size;
  bool gated;
};

// [rows, groups], contiguous.
const void* group_values(const char* op, const char* name, Tensor* values, DType dtype, int64_t rows, int64_t groups) {
  const Checked checked{op, name, *values};
  checked.in_place();
  checked.dtype({dtype});
  checked.shape({rows, groups});
  const bool dense = (groups <= 1 || values->stride(1) == 1) && (rows <= 1 || values->stride(0) == groups);
  if (!dense) *values = values->contiguous_copy();
  return values->data();
}

void linear_pack_weight_only(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "linear_pack_weight_only";
  PackArguments arguments{Stack(stack)};
  const Tensor& weight = arguments.weight;
  const Checked checked{kOp, "weight", weight};
  checked.in_place();
  checked.dtype({DType::s8});
  if (weight.dims() != 2) {
    checked.fail("expected two dimensions [out_features, in_features], got shape ", weight.shape_text());
  }
  const int64_t rows = weight.size(0), k = weight.size(1), group = arguments.group_size;
  if (arguments.bits != 4 && arguments.bits != 8) fail(kOp, "bits", "expected 4 or 8, got ", arguments.bits);
  if (group != k && (group <= 0 || group > k || group % kCodedTileK != 0)) {
    fail(kOp, "group_size", "expected a multiple of ", kCodedTileK, " below in_features, or all ", k, ", got ", group);
  }
  if (arguments.gated && rows % 2 != 0) {
    checked.fail("expected as many rows of the gate as of the other, got ", rows, " in all");
  }
  const int64_t groups = k == 0 ? 0 : ceil_div(k, group);
  WeightOnlyPackCall call{};
  call.weight = {weight.data(), DType::s8, weight.stride(0), weight.stride(1)};
  call.scale = static_cast<const float*>(group_values(kOp, "scale", &arguments.scale, DType::f32, rows, groups));
  if (arguments.zero_point) {
    call.zero_point =
        static_cast<const int32_t*>(group_values(kOp, "zero_point", &arguments.zero_point, DType::s32, rows, groups));
  }
  if (!weight_only_header_init(&call.header, static_cast<int>(arguments.bits), arguments.gated ? rows / 2 : rows, k,
                               group, arguments.gated, bool{arguments.zero_point})) {
    checked.fail("packed, its shape [", rows, ", ", k, "] is more than fits in memory");
  }
  Tensor packed = Tensor::packed_bytes(call.header.bytes);
  call.packed = packed.mutable_data();
  if (!pack_weight_only(call)) {
    checked.fail("expected values of ", arguments.bits, " bits (-8 to 7 for 4), and zero points from -128 to 127");
  }
  return_tensor(stack, 0, std::move(packed));
}

// ---- Multiplying ---------------------------------------------------------------------------------------------------

constexpr const char* kOp = "linear_weight_only";

struct Arguments {
  explicit Arguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        out_features(stack.integer()),
        bias(stack.optional_tensor()),
        up_bias(stack.optional_tensor()),
        gated(stack.boolean()),
        fused(stack),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input, packed;
  int64_t out_features;
  Tensor bias, up_bias;
  bool gated;
  FusedArguments fused;
  std::optional<int32_t> out_dtype;
};

WeightOnlyHeader checked_header(const Tensor& packed, int64_t out_features, int64_t in_features, bool gated) {
  const Checked checked{kOp, "packed", packed};
  check_packed_bytes(checked);
  const auto header = header_of<WeightOnlyHeader>(packed);
  if (const char* error = weight_only_header_error(&header, packed.size(0))) {
    checked.fail("expected a weight as made by linear_pack_weight_only, but ", error, " (", packed.size(0), " bytes)");
  }
  check_packed_alignment(checked);
  if (header.k != in_features) {
    fail(kOp, "input", "expected a last dimension of ", header.k, ", the packed weight's in_features, got ",
         in_features);
  }
  if (header.n != out_features) {
    fail(kOp, "out_features", "expected ", header.n, ", the packed weight's, got ", out_features);
  }
  // Asked for, since what a call costs has to follow from its arguments: the bytes of a pair are those of other weights.
  if ((header.gated != 0) != gated) {
    fail(kOp, "gated", gated ? "expected False for a single weight, got True" : "expected True for a pair, got False");
  }
  return header;
}

void run(const WeightOnlyCall& call) {
  static Kernel<WeightOnlyFn> f32("gemm_weight_only", "f32"), bf16("gemm_weight_only", "bf16"),
      f16("gemm_weight_only", "f16");
  if (call.gemm.m == 0 || call.gemm.weight.n == 0) return;
  const DType dtype = call.gemm.weight.dtype;
  Kernel<WeightOnlyFn>& kernel = dtype == DType::f32 ? f32 : dtype == DType::bf16 ? bf16 : f16;
  const CodedWeight& codes = call.codes;
  if (codes.k_tiles == 0) return kernel(call);
  run_tuned(kernel, call, {{{codes.codes, static_cast<size_t>(codes.panels * codes.panel_bytes)}, {}}});
}

void linear_weight_only(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments{Stack(stack)};
  Tensor& input = arguments.input;
  const int64_t n = arguments.out_features;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "up_bias", arguments.up_bias},
                     {kOp, "other", arguments.fused.other}});
  const bool gated = arguments.gated;
  const WeightOnlyHeader header = checked_header(arguments.packed, n, input_features(kOp, input), gated);
  if (arguments.up_bias && !gated) fail(kOp, "up_bias", "expected None, since the packed weight is a single one");

  const RowsView rows = rows_view(kOp, "input", &input, kFloating);
  PackedHeader decoded;
  if (!packed_header_init(&decoded, rows.dtype, n, header.k, gated, false)) {
    fail(kOp, "packed", "in the input's dtype it is more than fits in memory");
  }
  WeightOnlyCall call{{input_rows(input), rows, PackedWeight(decoded, nullptr), {}},
                      CodedWeight(header, arguments.packed.data())};
  Epilogue& epilogue = call.gemm.epilogue;
  arguments.fused.set(kOp, &epilogue);
  if (gated && epilogue.binary != Binary::none) fail(kOp, "binary", "expected 'none' for a gated pair of weights");
  epilogue.bias = column_vector(kOp, "bias", &arguments.bias, n);
  epilogue.up_bias = column_vector(kOp, "up_bias", &arguments.up_bias, n);
  set_other(kOp, "other", &arguments.fused.other, input, n, true, &epilogue);
  epilogue.out_dtype = output_dtype(kOp, arguments.out_dtype, input, kFloating);

  Tensor out = empty_output(kOp, input, n, epilogue.out_dtype);
  epilogue.out = out.mutable_data();
  epilogue.out_row_stride = n;
  run(call);
  return_tensor(stack, 0, std::move(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "linear_pack_weight_only(Tensor weight, Tensor scale, Tensor? zero_point=None, *, int bits, int group_size, "
      "bool gated=False) -> Tensor");
  library.def(
      "linear_weight_only(Tensor input, Tensor packed, int out_features, Tensor? bias=None, Tensor? up_bias=None, *, "
      "bool gated=False, str activation=\"none\", float alpha=0., float beta=0., str binary=\"none\", Tensor? "
      "other=None, "
      "bool activation_last=False, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("linear_pack_weight_only", &linear_pack_weight_only);
  library.impl("linear_weight_only", &linear_weight_only);
}
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("linear_pack_weight_only", &on_host<linear_pack_weight_only, 'T', 'T', 'O'>);
  library.impl("linear_weight_only", &on_xpu<linear_weight_only>);
}

}  // namespace xopt::ops
