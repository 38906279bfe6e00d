// xopt::batch_norm: a BatchNorm by running statistics and what follows it, with the channels last in memory.
#include "kernels/batch_norm.h"

#include "ops/conv_call.h"
#include "ops/images.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "batch_norm";

void run(const BatchNormCall& call) {
  static Kernel<BatchNormFn> kernel("batch_norm", "f32");
  kernel(call);
}

struct BatchNormArguments {
  explicit BatchNormArguments(Stack stack)
      : input(stack.tensor()),
        mean(stack.tensor()),
        variance(stack.tensor()),
        weight(stack.optional_tensor()),
        bias(stack.optional_tensor()),
        eps(stack.number()),
        fused(stack),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input, mean, variance, weight, bias;
  double eps;
  FusedArguments fused;
  std::optional<int32_t> out_dtype;
};

void note(const BatchNormCall& call, const BatchNormArguments& arguments) {
  NotedCall* noted = note_call(&run, call);
  if (noted == nullptr) return;
  noted->reads(call.input.data, arguments.input);
  noted->reads(call.mean.data, arguments.mean);
  noted->reads(call.variance.data, arguments.variance);
  noted->reads(call.weight.data, arguments.weight);
  noted->reads(call.epilogue.bias.data, arguments.bias);
  noted->reads(call.epilogue.other, arguments.fused.other);
  noted->writes(call.epilogue.out, 0);
}

Tensor batch_norm(Stack stack) {
  BatchNormArguments arguments{stack};
  Tensor& input = arguments.input;
  const Checked checked{kOp, "input", input};
  check_no_gradient({checked,
                     {kOp, "mean", arguments.mean},
                     {kOp, "variance", arguments.variance},
                     {kOp, "weight", arguments.weight},
                     {kOp, "bias", arguments.bias},
                     {kOp, "other", arguments.fused.other}});
  checked.in_place();
  BatchNormCall call{};
  const DType dtype = checked.dtype(kFloating);
  if (input.dims() < 2 || input.dims() > 5) {
    checked.fail("expected 2 to 5 dimensions [images, channels, spatial...], got shape ", input.shape_text());
  }
  call.channels = input.size(1);
  call.mean = column_vector(kOp, "mean", &arguments.mean, call.channels);
  call.variance = column_vector(kOp, "variance", &arguments.variance, call.channels);
  call.weight = column_vector(kOp, "weight", &arguments.weight, call.channels);
  call.eps = checked_eps(kOp, arguments.eps);
  call.epilogue.out_dtype = output_dtype(kOp, arguments.out_dtype, input, kFloating);
  Tensor out = conv_output(kOp, &arguments.bias, &arguments.fused, input.sizes(), input.dims(), &call.epilogue);
  if (out.numel() == 0) return out;
  call.rows = out.numel() / call.channels;
  if (!is_channels_last(input) || !collapse_positions(input, &call.input)) {
    input = input.channels_last_copy();
    collapse_positions(input, &call.input);
  }
  call.input.data = input.data();
  call.input.dtype = dtype;
  run(call);
  note(call, arguments);
  return out;
}

const ChainableOp chainable(kOp, &batch_norm);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "batch_norm(Tensor input, Tensor mean, Tensor variance, Tensor? weight=None, Tensor? bias=None, *, "
      "float eps=1e-5, str activation=\"none\", float alpha=0., float beta=0., str binary=\"none\", "
      "Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("batch_norm", &boxed<batch_norm>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("batch_norm", &on_xpu<boxed<batch_norm>>); }

}  // namespace xopt::ops
