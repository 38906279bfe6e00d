// xopt::qlinear: int8 input * packed int8 weight^T, dequantised, and what follows it.
#include "ops/gemm_arguments.h"
#include "ops/quantization.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "qlinear";

struct QLinearArguments {
  explicit QLinearArguments(Stack stack)
      : input(stack.tensor()),
        input_scale(stack.tensor()),
        input_zero_point(stack.optional_tensor()),
        packed(stack.tensor()),
        out_features(stack.integer()),
        bias(stack.optional_tensor()),
        fused(stack),
        out_dtype(stack.dtype_code()),
        output_scale(stack.number()),
        output_zero_point(stack.integer()) {}

  Tensor input, input_scale, input_zero_point, packed;
  int64_t out_features;
  Tensor bias;
  FusedArguments fused;
  int32_t out_dtype;
  double output_scale;
  int64_t output_zero_point;
};

// A quantisation parameter of the input: one value, or one for each row. Replaced by a copy if its stride is not 1.
const void* row_parameter(const char* name, Tensor* tensor, DType dtype, int64_t rows, bool* per_row) {
  const Checked checked{kOp, name, *tensor};
  const bool single = is_single_parameter(checked, dtype);
  if (!single && (tensor->dims() != 1 || tensor->size(0) != rows)) {
    checked.fail("expected shape [1] or [", rows, "], one value for each row of the input, got ", tensor->shape_text());
  }
  *per_row = !single;
  if (!single && tensor->stride(0) != 1) *tensor = tensor->contiguous_copy();
  return tensor->data();
}

void qlinear(StableIValue* stack, uint64_t, uint64_t) {
  QLinearArguments arguments{Stack(stack)};
  Tensor& input = arguments.input;
  const int64_t n = arguments.out_features;
  check_no_gradient({{kOp, "input_scale", arguments.input_scale},
                     {kOp, "bias", arguments.bias},
                     {kOp, "other", arguments.fused.other}});

  const int64_t in_features = input_features(kOp, input);
  const PackedWeight weight = packed_weight(kOp, arguments.packed, WeightKind::int8, false, n, in_features);
  GemmCall call{input_rows(input), rows_view(kOp, "input", &input, {DType::u8, DType::s8}), weight, {}};
  Epilogue& epilogue = call.epilogue;
  epilogue.row_scale = static_cast<const float*>(
      row_parameter("input_scale", &arguments.input_scale, DType::f32, call.m, &epilogue.row_scale_per_row));
  if (arguments.input_zero_point) {
    epilogue.row_zero_point = static_cast<const int32_t*>(row_parameter(
        "input_zero_point", &arguments.input_zero_point, DType::s32, call.m, &epilogue.row_zero_point_per_row));
  }
  arguments.fused.set(kOp, &epilogue);
  epilogue.bias = column_vector(kOp, "bias", &arguments.bias, n);
  set_other(kOp, "other", &arguments.fused.other, input, n, true, &epilogue);
  const DType out_dtype =
      parse_dtype(kOp, "out_dtype", arguments.out_dtype, {DType::f32, DType::bf16, DType::f16, DType::s8, DType::u8});
  set_output_type(kOp, out_dtype, arguments.output_scale, arguments.output_zero_point, &epilogue);

  return_tensor(stack, 0, run_into_rows(kOp, input, &call));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "qlinear(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int out_features, "
      "Tensor? bias=None, *, str activation=\"none\", float alpha=0., float beta=0., str binary=\"none\", "
      "Tensor? other=None, bool activation_last=False, ScalarType out_dtype=float, float output_scale=1., "
      "int output_zero_point=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("qlinear", &qlinear); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("qlinear", &on_xpu<qlinear>); }

}  // namespace xopt::ops
