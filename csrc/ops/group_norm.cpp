// xopt::group_norm: GroupNorm and the activation after it, with the channels last in memory.
#include "kernels/group_norm.h"

#include "ops/gemm_arguments.h"
#include "ops/images.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "group_norm";
constexpr NamedValue<Activation> kActivations[] = {
    {"none", Activation::none}, {"relu", Activation::relu}, {"silu", Activation::silu}};

void run(const GroupNormCall& call) {
  static Kernel<GroupNormFn> kernel("group_norm", "f32");
  kernel(call);
}

struct GroupNormArguments {
  explicit GroupNormArguments(Stack stack)
      : input(stack.tensor()),
        groups(stack.integer()),
        weight(stack.optional_tensor()),
        bias(stack.optional_tensor()),
        eps(stack.number()),
        activation(stack.string()),
        out_dtype(stack.optional_dtype_code()),
        shift(stack.optional_tensor()) {}

  Tensor input;
  int64_t groups;
  Tensor weight, bias;
  double eps;
  String activation;
  std::optional<int32_t> out_dtype;
  Tensor shift;
};

// Of each image's channels, or of all images'.
void set_shift(Tensor* shift, GroupNormCall* call) {
  if (!*shift) return;
  const Checked checked{kOp, "shift", *shift};
  checked.in_place();
  const DType dtype = checked.dtype(kFloating);
  const bool fits = shift->dims() == 2 && shift->size(1) == call->channels;
  if (!fits || (shift->size(0) != 1 && shift->size(0) != call->images)) {
    checked.fail("expected shape [1 or ", call->images, ", ", call->channels, "], got ", shift->shape_text());
  }
  call->shift_stride = shift->size(0) == 1 ? 0 : call->channels;
  if (!shift->is_contiguous()) *shift = shift->contiguous_copy();
  call->shift = {shift->data(), dtype};
}

// Whether pixels lie side by side, image after image.
bool is_dense(const Tensor& input) {
  int64_t expected = input.size(1);
  for (int64_t dim = input.dims() - 1; dim >= 0; --dim) {
    if (dim == 1) continue;
    if (input.size(dim) > 1 && input.stride(dim) != expected) return false;
    expected *= input.size(dim);
  }
  return is_channels_last(input);
}

Tensor group_norm(Stack stack) {
  GroupNormArguments arguments{stack};
  Tensor& input = arguments.input;
  const Checked checked{kOp, "input", input};
  check_no_gradient(
      {checked, {kOp, "weight", arguments.weight}, {kOp, "bias", arguments.bias}, {kOp, "shift", arguments.shift}});
  checked.in_place();
  GroupNormCall call{};
  call.dtype = checked.dtype(kFloating);
  if (input.dims() < 3 || input.dims() > 5) {
    checked.fail("expected 3 to 5 dimensions [images, channels, spatial...], got shape ", input.shape_text());
  }
  call.images = input.size(0);
  call.channels = input.size(1);
  call.groups = arguments.groups;
  if (call.groups < 1 || call.channels % call.groups != 0) {
    fail(kOp, "groups", "expected a divisor of the ", call.channels, " channels, got ", call.groups);
  }
  call.weight = column_vector(kOp, "weight", &arguments.weight, call.channels);
  call.bias = column_vector(kOp, "bias", &arguments.bias, call.channels);
  set_shift(&arguments.shift, &call);
  call.eps = checked_eps(kOp, arguments.eps);
  call.activation = parse_name(kOp, "activation", arguments.activation.text(), kActivations);
  call.out_dtype = arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : call.dtype;

  Tensor out = Tensor::empty_channels_last(input.sizes(), input.dims(), call.out_dtype);
  call.out = out.mutable_data();
  if (out.numel() > 0) {
    if (!is_dense(input)) input = input.channels_last_copy();
    call.input = input.data();
    call.positions = input.numel() / (call.images * call.channels);
    run(call);
    if (NotedCall* noted = note_call(&run, call)) {
      noted->reads(call.input, input);
      noted->reads(call.weight.data, arguments.weight);
      noted->reads(call.bias.data, arguments.bias);
      noted->reads(call.shift.data, arguments.shift);
      noted->writes(call.out, 0);
    }
  }
  return out;
}

const ChainableOp chainable("group_norm", &group_norm);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "group_norm(Tensor input, int groups, Tensor? weight=None, Tensor? bias=None, *, float eps=1e-5, "
      "str activation=\"none\", ScalarType? out_dtype=None, Tensor? shift=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("group_norm", &boxed<group_norm>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("group_norm", &on_xpu<boxed<group_norm>>); }

}  // namespace xopt::ops
