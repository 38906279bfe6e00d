// xopt::layer_norm, rms_norm and unit_norm: a norm over the last dimension, the first two with the addition of a residual
// before it.
#include "kernels/norm.h"

#include "ops/gemm_arguments.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

// What the two have in common; the order of the schema is that of the constructors below.
struct NormArguments {
  Tensor input, weight, bias;
  double eps = 0, weight_offset = 0;
  Tensor residual;
  bool return_sum = false;
  std::optional<int32_t> out_dtype;
};

NormArguments layer_norm_arguments(Stack stack) {
  NormArguments arguments;
  arguments.input = Tensor(stack.tensor());
  arguments.weight = Tensor(stack.optional_tensor());
  arguments.bias = Tensor(stack.optional_tensor());
  arguments.eps = stack.number();
  arguments.residual = Tensor(stack.optional_tensor());
  arguments.return_sum = stack.boolean();
  arguments.out_dtype = stack.optional_dtype_code();
  return arguments;
}

NormArguments rms_norm_arguments(Stack stack) {
  NormArguments arguments;
  arguments.input = Tensor(stack.tensor());
  arguments.weight = Tensor(stack.optional_tensor());
  arguments.eps = stack.number();
  arguments.weight_offset = stack.number();
  arguments.residual = Tensor(stack.optional_tensor());
  arguments.return_sum = stack.boolean();
  arguments.out_dtype = stack.optional_dtype_code();
  return arguments;
}

RowsView residual_view(const char* op, Tensor* residual, const Tensor& input) {
  const Checked checked{op, "residual", *residual};
  checked.in_place();
  bool same = residual->dims() == input.dims();
  for (int64_t dim = 0; same && dim < input.dims(); ++dim) same = residual->size(dim) == input.size(dim);
  if (!same) checked.fail("expected the input's shape ", input.shape_text(), ", got ", residual->shape_text());
  return rows_view(op, "residual", residual, kFloating);
}

void run(const NormCall& call) {
  static Kernel<NormFn> kernel("norm", "f32");
  if (call.rows > 0 && call.columns > 0) kernel(call);
}

Pair run_norm(const char* op, Norm norm, NormArguments arguments) {
  Tensor& input = arguments.input;
  check_no_gradient({{op, "input", input},
                     {op, "weight", arguments.weight},
                     {op, "bias", arguments.bias},
                     {op, "residual", arguments.residual}});
  NormCall call{};
  call.norm = norm;
  call.columns = input_features(op, input);
  call.rows = input_rows(input);
  if (arguments.residual) call.residual = residual_view(op, &arguments.residual, input);
  call.input = rows_view(op, "input", &input, kFloating);
  call.weight = column_vector(op, "weight", &arguments.weight, call.columns);
  call.bias = column_vector(op, "bias", &arguments.bias, call.columns);
  call.eps = checked_eps(op, arguments.eps);
  call.weight_offset = static_cast<float>(arguments.weight_offset);
  call.out_dtype =
      arguments.out_dtype ? parse_dtype(op, "out_dtype", *arguments.out_dtype, kFloating) : call.input.dtype;

  Tensor out = empty_output(op, input, call.columns, call.out_dtype);
  const int64_t no_elements = 0;
  Tensor sum = arguments.return_sum ? empty_output(op, input, call.columns, call.input.dtype)
                                    : Tensor::empty(&no_elements, 1, call.input.dtype);
  call.out = out.mutable_data();
  call.sum = arguments.return_sum ? sum.mutable_data() : nullptr;
  call.sum_dtype = call.input.dtype;
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.input.data, input);
    noted->reads(call.residual.data, arguments.residual);
    noted->reads(call.weight.data, arguments.weight);
    noted->reads(call.bias.data, arguments.bias);
    noted->writes(call.out, 0);
    noted->writes(call.sum, 1);
  }
  return {std::move(out), std::move(sum)};
}

Pair layer_norm(Stack stack) { return run_norm("layer_norm", Norm::layer_norm, layer_norm_arguments(stack)); }
Pair rms_norm(Stack stack) { return run_norm("rms_norm", Norm::rms_norm, rms_norm_arguments(stack)); }

Tensor unit_norm(Stack stack) {
  NormArguments arguments;
  arguments.input = Tensor(stack.tensor());
  arguments.eps = stack.number();
  arguments.out_dtype = stack.optional_dtype_code();
  return run_norm("unit_norm", Norm::unit_norm, std::move(arguments)).first;
}

const ChainableOp chainable_layer_norm("layer_norm", &layer_norm), chainable_rms_norm("rms_norm", &rms_norm),
    chainable_unit_norm("unit_norm", &unit_norm);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "layer_norm(Tensor input, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5, Tensor? residual=None, "
      "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)");
  library.def(
      "rms_norm(Tensor input, Tensor? weight=None, *, float eps=1e-6, float weight_offset=0., Tensor? residual=None, "
      "bool return_sum=False, ScalarType? out_dtype=None) -> (Tensor out, Tensor sum)");
  library.def("unit_norm(Tensor input, *, float eps=1e-12, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("unit_norm", &boxed<unit_norm>);
  library.impl("layer_norm", &boxed<layer_norm>);
  library.impl("rms_norm", &boxed<rms_norm>);
}
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) {
  library.impl("layer_norm", &on_xpu<boxed<layer_norm>>);
  library.impl("rms_norm", &on_xpu<boxed<rms_norm>>);
  library.impl("unit_norm", &on_xpu<boxed<unit_norm>>);
}

}  // namespace xopt::ops
