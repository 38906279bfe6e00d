// xopt::rotary: rotary position embedding of queries and keys.
#include "kernels/rotary.h"

#include "ops/check.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "rotary";
constexpr const char* kHeads = "batch, heads, positions, depth";
constexpr const char* kAngles = "batch, positions, rotated columns";

void check_dims(const Checked& checked, int64_t dims, const char* names) {
  checked.in_place();
  if (checked.tensor.dims() != dims) checked.fail("expected [", names, "], got shape ", checked.tensor.shape_text());
}

void make_last_contiguous(Tensor* tensor) {
  const int64_t last = tensor->dims() - 1;
  if (tensor->size(last) > 1 && tensor->stride(last) != 1) *tensor = tensor->contiguous_copy();
}

RotatedHeads heads(const char* name, Tensor* tensor, RotaryCall* call) {
  const Checked checked{kOp, name, *tensor};
  check_dims(checked, 4, kHeads);
  checked.dtype({call->dtype});
  checked.shape({call->batch, tensor->size(1), call->positions, call->depth});
  make_last_contiguous(tensor);
  return {tensor->data(), tensor->size(1), tensor->stride(0), tensor->stride(1), tensor->stride(2), nullptr};
}

Angles angles(const char* name, Tensor* tensor, const RotaryCall& call) {
  const Checked checked{kOp, name, *tensor};
  check_dims(checked, 3, kAngles);
  const DType dtype = checked.dtype(kFloating);
  const int64_t batch = tensor->size(0) == 1 ? 1 : call.batch;
  checked.shape({batch, call.positions, call.rotated});
  make_last_contiguous(tensor);
  return {tensor->data(), dtype, batch == 1 ? 0 : tensor->stride(0), tensor->stride(1)};
}

// How many columns are turned: as many as there are angles.
int64_t rotated_columns(const Tensor& cos, int64_t depth) {
  const Checked checked{kOp, "cos", cos};
  check_dims(checked, 3, kAngles);
  const int64_t rotated = cos.size(2);
  if (rotated > depth || rotated % 2 != 0) {
    checked.fail("expected an even number of rotated columns, at most the depth ", depth, ", got shape ",
                 cos.shape_text());
  }
  return rotated;
}

void run(const RotaryCall& call) {
  static Kernel<RotaryFn> kernel("rotary", "f32");
  if (call.batch * call.positions * call.depth * (call.tensors[0].heads + call.tensors[1].heads) > 0) kernel(call);
}

Pair rotary(Stack arguments) {
  Tensor query(arguments.tensor()), key(arguments.tensor()), cos(arguments.tensor()), sin(arguments.tensor());
  const bool interleaved = arguments.boolean();
  check_no_gradient({{kOp, "query", query}, {kOp, "key", key}, {kOp, "cos", cos}, {kOp, "sin", sin}});

  const Checked checked{kOp, "query", query};
  check_dims(checked, 4, kHeads);
  RotaryCall call{};
  call.dtype = checked.dtype(kFloating);
  call.batch = query.size(0);
  call.positions = query.size(2);
  call.depth = query.size(3);
  if (call.depth % 2 != 0) checked.fail("expected an even depth, got shape ", query.shape_text());
  call.tensors[0] = heads("query", &query, &call);
  call.tensors[1] = heads("key", &key, &call);
  call.rotated = rotated_columns(cos, call.depth);
  call.interleaved = interleaved;
  call.cos = angles("cos", &cos, call);
  call.sin = angles("sin", &sin, call);

  Tensor outs[] = {Tensor::empty(query.sizes(), 4, call.dtype), Tensor::empty(key.sizes(), 4, call.dtype)};
  for (int i = 0; i < 2; ++i) call.tensors[i].out = outs[i].mutable_data();
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.tensors[0].data, query);
    noted->reads(call.tensors[1].data, key);
    noted->reads(call.cos.data, cos);
    noted->reads(call.sin.data, sin);
    for (int i = 0; i < 2; ++i) noted->writes(call.tensors[i].out, i);
  }
  return {std::move(outs[0]), std::move(outs[1])};
}

const ChainableOp chainable("rotary", &rotary);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, *, bool interleaved=False) "
      "-> (Tensor query_out, Tensor key_out)");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("rotary", &boxed<rotary>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("rotary", &on_xpu<boxed<rotary>>); }

}  // namespace xopt::ops
