// xopt::selective_scan: a state space over steps of time, with the state that it begins with and the one that it leaves.
#include "kernels/selective_scan.h"

#include "ops/check.h"
#include "ops/gemm_arguments.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "selective_scan";

struct SelectiveScanArguments {
  explicit SelectiveScanArguments(Stack stack)
      : input(stack.tensor()),
        dt(stack.tensor()),
        a(stack.tensor()),
        b(stack.tensor()),
        c(stack.tensor()),
        skip(stack.optional_tensor()),
        gate(stack.optional_tensor()),
        dt_bias(stack.optional_tensor()),
        state(stack.optional_tensor()),
        softplus(stack.boolean()),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor input, dt, a, b, c, skip, gate, dt_bias, state;
  bool softplus;
  std::optional<int32_t> out_dtype;
};

Series series(const char* name, const Tensor& tensor, const SelectiveScanCall& call, int64_t columns) {
  const Checked checked{kOp, name, tensor};
  checked.cpu();
  const DType dtype = checked.dtype(kFloating);
  checked.shape({call.batch, call.steps, columns});
  return {tensor.data(), dtype, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void run(const SelectiveScanCall& call) {
  static Kernel<SelectiveScanFn> kernel("selective_scan", "f32");
  if (call.batch * call.channels > 0) kernel(call);
}

// The sizes, as input and a have them.
SelectiveScanCall sizes(SelectiveScanArguments* arguments) {
  const Checked input{kOp, "input", arguments->input}, a{kOp, "a", arguments->a};
  input.cpu();
  a.cpu();
  if (input.tensor.dims() != 3) input.fail("expected [batch, steps, channels], got shape ", input.tensor.shape_text());
  if (a.tensor.dims() != 2) a.fail("expected [channels, states], got shape ", a.tensor.shape_text());
  SelectiveScanCall call{};
  call.batch = input.tensor.size(0);
  call.steps = input.tensor.size(1);
  call.channels = input.tensor.size(2);
  call.states = a.tensor.size(1);
  call.a_dtype = a.dtype(kFloating);
  a.shape({call.channels, call.states});
  if (!arguments->a.is_contiguous()) arguments->a = arguments->a.contiguous_copy();
  call.a = arguments->a.data();
  return call;
}

void set_state(Tensor* state, SelectiveScanCall* call) {
  if (!*state) return;
  const Checked checked{kOp, "state", *state};
  checked.cpu();
  call->state_dtype = checked.dtype(kFloating);
  checked.shape({call->batch, call->channels, call->states});
  if (!state->is_contiguous()) *state = state->contiguous_copy();
  call->state = state->data();
}

Pair selective_scan(Stack stack) {
  SelectiveScanArguments arguments{stack};
  check_no_gradient({{kOp, "input", arguments.input},
                     {kOp, "dt", arguments.dt},
                     {kOp, "a", arguments.a},
                     {kOp, "b", arguments.b},
                     {kOp, "c", arguments.c},
                     {kOp, "skip", arguments.skip},
                     {kOp, "gate", arguments.gate},
                     {kOp, "dt_bias", arguments.dt_bias},
                     {kOp, "state", arguments.state}});
  SelectiveScanCall call = sizes(&arguments);
  call.input = series("input", arguments.input, call, call.channels);
  call.dt = series("dt", arguments.dt, call, call.channels);
  call.b = series("b", arguments.b, call, call.states);
  call.c = series("c", arguments.c, call, call.states);
  if (arguments.gate) call.gate = series("gate", arguments.gate, call, call.channels);
  call.skip = column_vector(kOp, "skip", &arguments.skip, call.channels);
  call.dt_bias = column_vector(kOp, "dt_bias", &arguments.dt_bias, call.channels);
  call.softplus = arguments.softplus;
  set_state(&arguments.state, &call);
  call.out_dtype =
      arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : call.input.dtype;

  const int64_t state_sizes[] = {call.batch, call.channels, call.states};
  Tensor out = Tensor::empty(arguments.input.sizes(), 3, call.out_dtype);
  Tensor last_state = Tensor::empty(state_sizes, 3, DType::f32);
  call.out = out.mutable_data();
  call.last_state = static_cast<float*>(last_state.mutable_data());
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.input.data, arguments.input);
    noted->reads(call.dt.data, arguments.dt);
    noted->reads(call.a, arguments.a);
    noted->reads(call.b.data, arguments.b);
    noted->reads(call.c.data, arguments.c);
    noted->reads(call.skip.data, arguments.skip);
    noted->reads(call.gate.data, arguments.gate);
    noted->reads(call.dt_bias.data, arguments.dt_bias);
    noted->reads(call.state, arguments.state);
    noted->writes(call.out, 0);
    noted->writes(call.last_state, 1);
  }
  return {std::move(out), std::move(last_state)};
}

const ChainableOp chainable(kOp, &selective_scan);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "selective_scan(Tensor input, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? skip=None, Tensor? gate=None, "
      "Tensor? dt_bias=None, Tensor? state=None, *, bool softplus=False, ScalarType? out_dtype=None) "
      "-> (Tensor out, Tensor last_state)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("selective_scan", &boxed<selective_scan>); }

}  // namespace xopt::ops
