// xopt::causal_conv: a short convolution along time, with the state that it begins with and the one that it leaves.
#include "kernels/causal_conv.h"

#include "ops/check.h"
#include "ops/gemm_arguments.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "causal_conv";

struct CausalConvArguments {
  explicit CausalConvArguments(Stack stack)
      : input(stack.tensor()),
        weight(stack.tensor()),
        bias(stack.optional_tensor()),
        state(stack.optional_tensor()),
        silu(stack.boolean()),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input, weight, bias, state;
  bool silu;
  std::optional<int32_t> out_dtype;
};

void run(const CausalConvCall& call) {
  static Kernel<CausalConvFn> kernel("causal_conv", "f32");
  if (call.batch * call.channels > 0) kernel(call);
}

void set_input(const Tensor& input, CausalConvCall* call) {
  const Checked checked{kOp, "input", input};
  checked.cpu();
  const DType dtype = checked.dtype(kFloating);
  if (input.dims() != 3) checked.fail("expected [batch, steps, channels], got shape ", input.shape_text());
  call->batch = input.size(0);
  call->steps = input.size(1);
  call->channels = input.size(2);
  call->input = {input.data(), dtype, input.stride(0), input.stride(1), input.stride(2)};
}

void set_weight(Tensor* weight, CausalConvCall* call) {
  const Checked checked{kOp, "weight", *weight};
  checked.cpu();
  call->weight_dtype = checked.dtype(kFloating);
  if (weight->dims() != 2 || weight->size(0) != call->channels || weight->size(1) == 0) {
    checked.fail("expected [", call->channels, " channels, taps], got shape ", weight->shape_text());
  }
  call->taps = weight->size(1);
  if (!weight->is_contiguous()) *weight = weight->contiguous_copy();
  call->weight = weight->data();
}

void set_state(Tensor* state, CausalConvCall* call) {
  if (!*state) return;
  const Checked checked{kOp, "state", *state};
  checked.cpu();
  call->state_dtype = checked.dtype(kFloating);
  const bool known = state->dims() == 3 && state->size(0) == call->batch && state->size(1) == call->channels;
  if (!known || state->size(2) < call->taps - 1) {
    checked.fail("expected [", call->batch, ", ", call->channels, ", at least ", call->taps - 1, "], got shape ",
                 state->shape_text());
  }
  call->kept = state->size(2);
  const int64_t between = state->size(0) > 1 ? state->stride(0) : call->kept * call->channels;
  call->state_by_steps = !state->is_contiguous() && between == call->kept * call->channels && state->stride(1) == 1 &&
                         state->stride(2) == call->channels;
  if (!state->is_contiguous() && !call->state_by_steps) *state = state->contiguous_copy();
  call->state = state->data();
}

// As its state lies.
Tensor empty_state(const CausalConvCall& call) {
  constexpr int64_t kOrders[2][3] = {{0, 1, 2}, {0, 2, 1}};
  const int64_t sizes[] = {call.batch, call.channels, call.kept};
  return Tensor::empty_in_order(sizes, 3, call.state_dtype, kOrders[call.state_by_steps ? 1 : 0]);
}

Pair causal_conv(Stack stack) {
  CausalConvArguments arguments{stack};
  check_no_gradient({{kOp, "input", arguments.input},
                     {kOp, "weight", arguments.weight},
                     {kOp, "bias", arguments.bias},
                     {kOp, "state", arguments.state}});
  CausalConvCall call{};
  set_input(arguments.input, &call);
  set_weight(&arguments.weight, &call);
  call.bias = column_vector(kOp, "bias", &arguments.bias, call.channels);
  call.silu = arguments.silu;
  call.state_dtype = call.input.dtype;
  set_state(&arguments.state, &call);
  call.out_dtype =
      arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : call.input.dtype;

  Tensor out = Tensor::empty(arguments.input.sizes(), 3, call.out_dtype);
  Tensor last_state = empty_state(call);
  call.out = out.mutable_data();
  call.last_state = last_state.mutable_data();
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.input.data, arguments.input);
    noted->reads(call.weight, arguments.weight);
    noted->reads(call.bias.data, arguments.bias);
    noted->reads(call.state, arguments.state);
    noted->writes(call.out, 0);
    noted->writes(call.last_state, 1);
  }
  return {std::move(out), std::move(last_state)};
}

const ChainableOp chainable(kOp, &causal_conv);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "causal_conv(Tensor input, Tensor weight, Tensor? bias=None, Tensor? state=None, *, bool silu=False, "
      "ScalarType? out_dtype=None) -> (Tensor out, Tensor last_state)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("causal_conv", &boxed<causal_conv>); }

}  // namespace xopt::ops
