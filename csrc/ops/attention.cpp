// xopt::attention: softmax(scale * query key^T + mask) value over heads. With `one_sees_all` a single query is not causal:
// for language models it is the last word of a text, and several are its first ones. `sinks`: of each query one more score,
// of no value, as if a last key had nothing but this one to add.
#include "kernels/attention.h"

#include <algorithm>
#include <cmath>

#include "ops/check.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "ops/tuned.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "attention";

struct AttentionArguments {
  explicit AttentionArguments(Stack stack)
      : query(stack.tensor()),
        key(stack.tensor()),
        value(stack.tensor()),
        mask(stack.optional_tensor()),
        scale(stack.optional_number()),
        causal(stack.boolean()),
        causal_offset(stack.integer()),
        window(stack.integer()),
        one_sees_all(stack.boolean()),
        sinks(stack.optional_tensor()) {}

  Tensor query, key, value, mask;
  std::optional<double> scale;
  bool causal;
  int64_t causal_offset, window;
  bool one_sees_all;
  Tensor sinks;
};

void check_dims(const char* name, const Tensor& tensor, const char* rows, const char* columns) {
  if (tensor.dims() == 4) return;
  fail(kOp, name, "expected four dimensions [batch, heads, ", rows, ", ", columns, "], got shape ",
       tensor.shape_text());
}

// Checks the three tensors against each other and fills in the sizes.
DType check_heads(const AttentionArguments& arguments, AttentionCall* call) {
  const Tensor &query = arguments.query, &key = arguments.key, &value = arguments.value;
  const Checked checked[] = {{kOp, "query", query}, {kOp, "key", key}, {kOp, "value", value}};
  for (const Checked& one : checked) one.in_place();
  const DType dtype = checked[0].dtype(kFloating);
  checked[1].dtype({dtype});
  checked[2].dtype({dtype});
  check_dims("query", query, "queries", "depth");
  check_dims("key", key, "keys", "depth");
  check_dims("value", value, "keys", "value depth");
  call->batch = query.size(0);
  call->heads = key.size(1);
  call->queries = query.size(2);
  call->keys = key.size(2);
  call->depth = query.size(3);
  call->value_depth = value.size(3);
  checked[1].shape({call->batch, call->heads, call->keys, call->depth});
  checked[2].shape({call->batch, call->heads, call->keys, call->value_depth});
  const int64_t query_heads = query.size(1);
  if (call->heads == 0 ? query_heads != 0 : query_heads % call->heads != 0) {
    fail(kOp, "query", "expected a number of heads that is a multiple of the ", call->heads, " heads of key, got ",
         query_heads);
  }
  call->group = call->heads == 0 ? 0 : query_heads / call->heads;
  return dtype;
}

// The view of a tensor, which is replaced by a copy where its last dimension is not contiguous.
HeadsView heads_view(Tensor* tensor) {
  if (tensor->size(3) > 1 && tensor->stride(3) != 1) *tensor = tensor->contiguous_copy();
  return {tensor->data(), tensor->stride(0), tensor->stride(1), tensor->stride(2)};
}

MaskKind mask_kind(const char* name, const Tensor& mask, bool may_be_bool) {
  if (may_be_bool && mask.dtype_code() == aoti_torch_dtype_bool()) return MaskKind::allowed;
  const std::optional<DType> dtype = dtype_from_torch(mask.dtype_code());
  if (dtype == DType::f32) return MaskKind::f32;
  if (dtype == DType::bf16) return MaskKind::bf16;
  if (dtype == DType::f16) return MaskKind::f16;
  fail(kOp, name, "expected dtype ", may_be_bool ? "bool or " : "", "float32 or bfloat16 or float16, got ",
       torch_dtype_name(mask.dtype_code()));
}

// A mask with a column for each key, or sinks, which are one column. A mask of five dimensions is the same for all images,
// each of which is so many windows of the batch.
AttentionMask mask_view(const char* name, const Tensor& mask, const AttentionCall& call, int64_t columns,
                        bool is_sinks) {
  AttentionMask view;
  if (!mask) return view;
  const Checked checked{kOp, name, mask};
  checked.in_place();
  view.kind = mask_kind(name, mask, !is_sinks);
  const bool of_windows = mask.dims() == 5 && !is_sinks, repeats = of_windows && mask.size(0) == 1;
  view.batches = repeats ? std::max<int64_t>(1, mask.size(1)) : std::max<int64_t>(1, call.batch);
  const int64_t wanted[] = {repeats ? view.batches : call.batch, call.heads * call.group, call.queries, columns};
  int64_t* strides[] = {&view.batch_stride, &view.head_stride, &view.row_stride, &view.column_stride};
  bool fits = (mask.dims() <= 4 || repeats) && call.batch % view.batches == 0;
  for (int64_t dim = repeats ? 1 : 0; fits && dim < mask.dims(); ++dim) {
    const int64_t place = 4 - mask.dims() + dim;
    fits = mask.size(dim) == wanted[place] || mask.size(dim) == 1;
    if (mask.size(dim) != 1) *strides[place] = mask.stride(dim);
  }
  if (!fits && of_windows) {
    checked.fail("expected [1, windows, heads, queries, keys] with a number of windows that divides the batch of ",
                 call.batch, ", got ", mask.shape_text());
  }
  if (!fits) {
    checked.fail("expected a shape that broadcasts to [", wanted[0], ", ", wanted[1], ", ", wanted[2], ", ", wanted[3],
                 "], got ", mask.shape_text());
  }
  view.data = mask.data();
  return view;
}

// Causality and window as offsets from a query to its first and last key, where nothing overflows any more.
void set_band(const AttentionArguments& arguments, AttentionCall* call) {
  if (arguments.window < 0) fail(kOp, "window", "expected a number of at least 0, got ", arguments.window);
  const int64_t most = call->queries + call->keys;
  call->first_offset = -most;
  call->last_offset = most;
  const bool causal = arguments.causal && !(arguments.one_sees_all && call->queries == 1);
  if (causal) call->last_offset = std::clamp(arguments.causal_offset, -most, most);
  if (arguments.window > 0) {
    int64_t first = 0;
    if (__builtin_sub_overflow(arguments.causal_offset, arguments.window - 1, &first)) first = -most;
    call->first_offset = std::clamp(first, -most, most);
  }
}

float checked_scale(const std::optional<double>& scale, int64_t depth) {
  if (scale && !std::isfinite(*scale)) fail(kOp, "scale", "expected a finite number, got ", *scale);
  return static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, depth))));
}

struct ReadyAttention {
  AttentionCall call;
  DType dtype;
};

void run(const ReadyAttention& ready) {
  const auto& [call, dtype] = ready;
  static Kernel<AttentionFn> f32("attention", "f32"), bf16("attention", "bf16"), f16("attention", "f16");
  Kernel<AttentionFn>& kernel = dtype == DType::f32 ? f32 : dtype == DType::bf16 ? bf16 : f16;
  if (!tuning_on() || call.batch * call.heads * call.queries * call.keys == 0) return kernel(call);
  run_tuned(kernel, call, cold_memory(call, dtype));
}

Tensor attention(Stack stack) {
  AttentionArguments arguments{stack};
  check_no_gradient({{kOp, "query", arguments.query},
                     {kOp, "key", arguments.key},
                     {kOp, "value", arguments.value},
                     {kOp, "mask", arguments.mask},
                     {kOp, "sinks", arguments.sinks}});
  ReadyAttention ready{};
  AttentionCall& call = ready.call;
  ready.dtype = check_heads(arguments, &call);
  call.mask = mask_view("mask", arguments.mask, call, call.keys, false);
  call.sinks = mask_view("sinks", arguments.sinks, call, 1, true);
  set_band(arguments, &call);
  call.scale = checked_scale(arguments.scale, call.depth);
  call.query = heads_view(&arguments.query);
  call.key = heads_view(&arguments.key);
  call.value = heads_view(&arguments.value);

  const int64_t sizes[] = {call.batch, call.queries, call.heads * call.group, call.value_depth};
  Tensor out = Tensor::empty(sizes, 4, ready.dtype);
  call.out = out.mutable_data();
  run(ready);
  if (NotedCall* noted = note_call(&run, ready)) {
    noted->reads(call.query.data, arguments.query);
    noted->reads(call.key.data, arguments.key);
    noted->reads(call.value.data, arguments.value);
    noted->reads(call.mask.data, arguments.mask);
    noted->reads(call.sinks.data, arguments.sinks);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable("attention", &attention);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, *, float? scale=None, bool causal=False, "
      "int causal_offset=0, int window=0, bool one_sees_all=False, Tensor? sinks=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("attention", &boxed<attention>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("attention", &on_xpu<boxed<attention>>); }

}  // namespace xopt::ops
