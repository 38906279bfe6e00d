// xopt::linear_attention: over steps of time, with the state that it begins with and the one that it leaves.
#include "kernels/linear_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/check.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "linear_attention";

struct LinearAttentionArguments {
  explicit LinearAttentionArguments(Stack stack)
      : query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        decay(stack.tensor()),
        rate(stack.tensor()),
        state(stack.optional_tensor()),
        scale(stack.optional_number()),
        unit_eps(stack.optional_number()),
        corrects(stack.boolean()),
        state_by_columns(stack.boolean()),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor query, key, value, decay, rate, state;
  std::optional<double> scale, unit_eps;
  bool corrects, state_by_columns;
  std::optional<int32_t> out_dtype;
};

// [batch, steps, heads, columns], which is replaced by a copy where its columns are not contiguous.
HeadsView steps_view(const char* name, Tensor* tensor, const LinearAttentionCall& call, int64_t heads,
                     int64_t columns) {
  const Checked checked{kOp, name, *tensor};
  checked.cpu();
  checked.dtype({call.dtype});
  checked.shape({call.batch, call.steps, heads, columns});
  if (columns > 1 && tensor->stride(3) != 1) *tensor = tensor->contiguous_copy();
  return {tensor->data(), tensor->stride(0), tensor->stride(2), tensor->stride(1)};
}

// [batch, steps, heads], or with a last dimension for the rows of the state.
StepNumbers numbers(const char* name, const Tensor& tensor, const LinearAttentionCall& call, bool by_row) {
  const Checked checked{kOp, name, tensor};
  checked.cpu();
  const DType dtype = checked.dtype(kFloating);
  if (by_row) {
    checked.shape({call.batch, call.steps, call.heads, call.depth});
  } else {
    checked.shape({call.batch, call.steps, call.heads});
  }
  return {tensor.data(), dtype, tensor.stride(0), tensor.stride(2), tensor.stride(1), by_row ? tensor.stride(3) : 0};
}

// The sizes, as query and value have them.
LinearAttentionCall sizes(const LinearAttentionArguments& arguments) {
  const Tensor &query = arguments.query, &value = arguments.value;
  for (const Checked& checked : {Checked{kOp, "query", query}, Checked{kOp, "value", value}}) {
    checked.cpu();
    if (checked.tensor.dims() == 4) continue;
    checked.fail("expected [batch, steps, heads, depth], got shape ", checked.tensor.shape_text());
  }
  LinearAttentionCall call{};
  call.dtype = Checked{kOp, "query", query}.dtype(kFloating);
  call.batch = query.size(0);
  call.steps = query.size(1);
  call.heads = value.size(2);
  call.depth = query.size(3);
  call.value_depth = value.size(3);
  const int64_t key_heads = query.size(2);
  if (key_heads == 0 ? call.heads != 0 : call.heads % key_heads != 0) {
    fail(kOp, "value", "expected a number of heads that is a multiple of the ", key_heads, " heads of query, got ",
         call.heads);
  }
  call.group = key_heads == 0 ? 1 : call.heads / key_heads;
  return call;
}

void set_state(Tensor* state, LinearAttentionCall* call) {
  if (!*state) return;
  const Checked checked{kOp, "state", *state};
  checked.cpu();
  call->state_dtype = checked.dtype(kFloating);
  if (call->state_by_columns) {
    checked.shape({call->batch, call->heads, call->value_depth, call->depth});
  } else {
    checked.shape({call->batch, call->heads, call->depth, call->value_depth});
  }
  if (!state->is_contiguous()) *state = state->contiguous_copy();
  call->state = state->data();
}

void run(const LinearAttentionCall& call) {
  static Kernel<LinearAttentionFn> kernel("linear_attention", "f32");
  if (call.batch * call.heads * call.value_depth > 0) kernel(call);
}

Pair linear_attention(Stack stack) {
  LinearAttentionArguments arguments{stack};
  check_no_gradient({{kOp, "query", arguments.query},
                     {kOp, "key", arguments.key},
                     {kOp, "value", arguments.value},
                     {kOp, "decay", arguments.decay},
                     {kOp, "rate", arguments.rate},
                     {kOp, "state", arguments.state}});
  LinearAttentionCall call = sizes(arguments);
  const int64_t key_heads = arguments.query.size(2);
  call.query = steps_view("query", &arguments.query, call, key_heads, call.depth);
  call.key = steps_view("key", &arguments.key, call, key_heads, call.depth);
  call.value = steps_view("value", &arguments.value, call, call.heads, call.value_depth);
  call.decays_by_row = arguments.decay.dims() == 4;
  call.decay = numbers("decay", arguments.decay, call, call.decays_by_row);
  call.rate = numbers("rate", arguments.rate, call, false);
  call.corrects = arguments.corrects;
  call.state_by_columns = arguments.state_by_columns;
  set_state(&arguments.state, &call);
  call.out_dtype = arguments.out_dtype ? parse_dtype(kOp, "out_dtype", *arguments.out_dtype, kFloating) : call.dtype;
  const double depth = static_cast<double>(std::max<int64_t>(1, call.depth));
  const double scale = arguments.scale ? *arguments.scale : 1.0 / std::sqrt(depth);
  if (!std::isfinite(scale)) fail(kOp, "scale", "expected a finite number, got ", scale);
  call.scale = static_cast<float>(scale);
  call.unit_length = arguments.unit_eps.has_value();
  if (call.unit_length) {
    if (!(*arguments.unit_eps >= 0))
      fail(kOp, "unit_eps", "expected a number of at least 0, got ", *arguments.unit_eps);
    call.eps = static_cast<float>(*arguments.unit_eps);
  }

  const int64_t out_sizes[] = {call.batch, call.steps, call.heads, call.value_depth};
  int64_t state_sizes[] = {call.batch, call.heads, call.depth, call.value_depth};
  if (call.state_by_columns) std::swap(state_sizes[2], state_sizes[3]);
  Tensor out = Tensor::empty(out_sizes, 4, call.out_dtype), last_state = Tensor::empty(state_sizes, 4, DType::f32);
  call.out = out.mutable_data();
  call.last_state = static_cast<float*>(last_state.mutable_data());
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.query.data, arguments.query);
    noted->reads(call.key.data, arguments.key);
    noted->reads(call.value.data, arguments.value);
    noted->reads(call.decay.data, arguments.decay);
    noted->reads(call.rate.data, arguments.rate);
    noted->reads(call.state, arguments.state);
    noted->writes(call.out, 0);
    noted->writes(call.last_state, 1);
  }
  return {std::move(out), std::move(last_state)};
}

const ChainableOp chainable(kOp, &linear_attention);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "linear_attention(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor rate, Tensor? state=None, *, "
      "float? scale=None, float? unit_eps=None, bool corrects=True, bool state_by_columns=False, "
      "ScalarType? out_dtype=None) -> (Tensor out, Tensor last_state)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("linear_attention", &boxed<linear_attention>); }

}  // namespace xopt::ops
