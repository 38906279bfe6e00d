// xopt::linear, linear_gated and linear_norm: input * weight^T with a packed floating-point weight, and what follows.
#include "ops/gemm_arguments.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

GemmCall gemm_call(const char* op, Tensor* input, const PackedWeight& weight) {
  return {input_rows(*input), rows_view(op, "input", input, kFloating), weight, {}};
}

GemmCall gemm_call(const char* op, Tensor* input, const Tensor& packed, int64_t out_features, bool gated) {
  const int64_t in_features = input_features(op, *input);
  return gemm_call(op, input, packed_weight(op, packed, WeightKind::floating, gated, out_features, in_features));
}

// ---- linear --------------------------------------------------------------------------------------------------------

struct LinearArguments {
  explicit LinearArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        out_features(stack.integer()),
        bias(stack.optional_tensor()),
        fused(stack),
        out_dtype(stack.optional_dtype_code()),
        output_scale(stack.number()),
        output_zero_point(stack.integer()),
        first_column(stack.integer()),
        scale(stack.optional_tensor()) {}

  Tensor input, packed;
  int64_t out_features;
  Tensor bias;
  FusedArguments fused;
  std::optional<int32_t> out_dtype;
  double output_scale;
  int64_t output_zero_point;
  int64_t first_column;
  Tensor scale;
};

Tensor linear(Stack stack) {
  constexpr const char* kOp = "linear";
  LinearArguments arguments{stack};
  Tensor& input = arguments.input;
  const int64_t n = arguments.out_features;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "other", arguments.fused.other},
                     {kOp, "scale", arguments.scale}});

  GemmCall call = gemm_call(kOp, &input,
                            packed_columns(kOp, arguments.packed, WeightKind::floating, arguments.first_column, n,
                                           input_features(kOp, input)));
  Epilogue& epilogue = call.epilogue;
  arguments.fused.set(kOp, &epilogue);
  epilogue.scale = column_vector(kOp, "scale", &arguments.scale, n);
  epilogue.bias = column_vector(kOp, "bias", &arguments.bias, n);
  set_other(kOp, "other", &arguments.fused.other, input, n, true, &epilogue);
  const DType out_dtype =
      output_dtype(kOp, arguments.out_dtype, input, {DType::f32, DType::bf16, DType::f16, DType::s8, DType::u8});
  set_output_type(kOp, out_dtype, arguments.output_scale, arguments.output_zero_point, &epilogue);

  Tensor out = run_into_rows(kOp, input, &call, stack.may_space_rows());
  if (NotedCall* noted = note_gemm(call, input, arguments.packed, arguments.bias)) {
    noted->reads(epilogue.scale.data, arguments.scale);
    noted->reads(epilogue.other, arguments.fused.other);
  }
  return out;
}

const ChainableOp chainable("linear", &linear, Reads::rows);

// ---- linear_gated --------------------------------------------------------------------------------------------------

struct LinearGatedArguments {
  explicit LinearGatedArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        out_features(stack.integer()),
        gate_bias(stack.optional_tensor()),
        up_bias(stack.optional_tensor()),
        activation(stack),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input, packed;
  int64_t out_features;
  Tensor gate_bias, up_bias;
  ActivationArguments activation;
  std::optional<int32_t> out_dtype;
};

Tensor linear_gated(Stack stack) {
  constexpr const char* kOp = "linear_gated";
  LinearGatedArguments arguments{stack};
  Tensor& input = arguments.input;
  const int64_t n = arguments.out_features;
  check_no_gradient(
      {{kOp, "input", input}, {kOp, "gate_bias", arguments.gate_bias}, {kOp, "up_bias", arguments.up_bias}});

  GemmCall call = gemm_call(kOp, &input, arguments.packed, n, true);
  Epilogue& epilogue = call.epilogue;
  arguments.activation.set(kOp, &epilogue);
  epilogue.bias = column_vector(kOp, "gate_bias", &arguments.gate_bias, n);
  epilogue.up_bias = column_vector(kOp, "up_bias", &arguments.up_bias, n);
  epilogue.out_dtype = output_dtype(kOp, arguments.out_dtype, input, kFloating);

  Tensor out = run_into_rows(kOp, input, &call, stack.may_space_rows());
  if (NotedCall* noted = note_gemm(call, input, arguments.packed, arguments.gate_bias)) {
    noted->reads(epilogue.up_bias.data, arguments.up_bias);
  }
  return out;
}

const ChainableOp chainable_gated("linear_gated", &linear_gated, Reads::rows);

// ---- linear_norm ---------------------------------------------------------------------------------------------------

constexpr NamedValue<Norm> kNorms[] = {{"layer_norm", Norm::layer_norm}, {"rms_norm", Norm::rms_norm}};

struct LinearNormArguments {
  explicit LinearNormArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        out_features(stack.integer()),
        bias(stack.optional_tensor()),
        residual(stack.optional_tensor()),
        norm(stack.string()),
        norm_weight(stack.optional_tensor()),
        norm_bias(stack.optional_tensor()),
        eps(stack.number()),
        out_dtype(stack.optional_dtype_code()),
        return_sum(stack.boolean()) {}

  Tensor input, packed;
  int64_t out_features;
  Tensor bias, residual;
  String norm;
  Tensor norm_weight, norm_bias;
  double eps;
  std::optional<int32_t> out_dtype;
  bool return_sum;
};

Pair linear_norm(Stack stack) {
  constexpr const char* kOp = "linear_norm";
  LinearNormArguments arguments{stack};
  Tensor& input = arguments.input;
  const int64_t n = arguments.out_features;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "residual", arguments.residual},
                     {kOp, "norm_weight", arguments.norm_weight},
                     {kOp, "norm_bias", arguments.norm_bias}});

  GemmCall call = gemm_call(kOp, &input, arguments.packed, n, false);
  Epilogue& epilogue = call.epilogue;
  epilogue.bias = column_vector(kOp, "bias", &arguments.bias, n);
  set_other(kOp, "residual", &arguments.residual, input, n, false, &epilogue);
  if (arguments.residual) epilogue.binary = Binary::add;
  epilogue.norm = parse_name(kOp, "norm", arguments.norm.text(), kNorms);
  epilogue.norm_weight = column_vector(kOp, "norm_weight", &arguments.norm_weight, n);
  epilogue.norm_bias = column_vector(kOp, "norm_bias", &arguments.norm_bias, n);
  epilogue.norm_eps = checked_eps(kOp, arguments.eps);
  epilogue.out_dtype = output_dtype(kOp, arguments.out_dtype, input, kFloating);

  const int64_t no_elements = 0;
  Tensor sum = arguments.return_sum ? empty_output(kOp, input, n, epilogue.out_dtype)
                                    : Tensor::empty(&no_elements, 1, epilogue.out_dtype);
  epilogue.sum = arguments.return_sum ? sum.mutable_data() : nullptr;
  Tensor out = run_into_rows(kOp, input, &call);
  if (NotedCall* noted = note_gemm(call, input, arguments.packed, arguments.bias)) {
    noted->reads(epilogue.other, arguments.residual);
    noted->reads(epilogue.norm_weight.data, arguments.norm_weight);
    noted->reads(epilogue.norm_bias.data, arguments.norm_bias);
    noted->writes(epilogue.sum, 1);
  }
  return {std::move(out), std::move(sum)};
}

const ChainableOp chainable_norm("linear_norm", &linear_norm, Reads::rows);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "linear(Tensor input, Tensor packed, int out_features, Tensor? bias=None, *, str activation=\"none\", "
      "float alpha=0., float beta=0., str binary=\"none\", Tensor? other=None, bool activation_last=False, "
      "ScalarType? out_dtype=None, float output_scale=1., int output_zero_point=0, int first_column=0, "
      "Tensor? scale=None) -> Tensor");
  library.def(
      "linear_gated(Tensor input, Tensor packed, int out_features, Tensor? gate_bias=None, Tensor? up_bias=None, *, "
      "str activation=\"silu\", float alpha=0., float beta=0., ScalarType? out_dtype=None) -> Tensor");
  library.def(
      "linear_norm(Tensor input, Tensor packed, int out_features, Tensor? bias=None, Tensor? residual=None, *, "
      "str norm=\"layer_norm\", Tensor? norm_weight=None, Tensor? norm_bias=None, float eps=1e-5, "
      "ScalarType? out_dtype=None, bool return_sum=False) -> (Tensor out, Tensor sum)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("linear", &boxed<linear>);
  library.impl("linear_gated", &boxed<linear_gated>);
  library.impl("linear_norm", &boxed<linear_norm>);
}
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("linear", &on_xpu<boxed<linear>>);
  library.impl("linear_gated", &on_xpu<boxed<linear_gated>>);
  library.impl("linear_norm", &on_xpu<boxed<linear_norm>>);
}

}  // namespace xopt::ops
