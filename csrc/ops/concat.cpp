// xopt::concat: two tensors one after the other along a dimension, as torch.cat gives them.
#include "kernels/concat.h"

#include "ops/check.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "concat";
constexpr const char* kNames[] = {"first", "second"};
constexpr int64_t kMostDims = Integers::kMost;

// The result's dimensions from the outermost in memory to the innermost.
struct Order {
  int64_t dims[kMostDims];
  int64_t count;
};

// Whether torch takes an image for one whose channels are last: its strides grow in that order, with gaps or without. A
// channel of a larger image, for which the order of its strides says nothing, is none.
bool is_like_channels_last(const Tensor& image) {
  const int64_t dims = image.dims();
  if (dims < 4 || image.stride(1) == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t dim = i == 0 ? 1 : i + 1 < dims ? dims - i : 0, stride = image.stride(dim);
    if (image.size(dim) == 0 || stride < least || (dim == 0 && least == image.stride(1))) return false;
    least = stride * image.size(dim);
  }
  return true;
}

// As torch has it: images whose channels are last in memory stay so.
Order order_of(const Tensor (&parts)[2]) {
  const bool channels_last = is_like_channels_last(parts[0]) && is_like_channels_last(parts[1]);
  Order order{{}, parts[0].dims()};
  for (int64_t i = 0; i < order.count; ++i) {
    order.dims[i] = !channels_last || i == 0 ? i : i + 1 < order.count ? i + 1 : 1;
  }
  return order;
}

// Dimensions of a part from the innermost on, those that lie alike in the part and in the result as one; false where
// there are too many.
bool set_runs(const Tensor& part, const Order& order, const Tensor& out, int64_t unit, CopiedRuns* runs) {
  runs->from = part.data();
  runs->run_bytes = unit;
  for (int dim = 0; dim < CopiedRuns::kDims; ++dim) runs->size[dim] = 1;
  int next = CopiedRuns::kDims;
  for (int64_t i = order.count - 1; i >= 0; --i) {
    const int64_t dim = order.dims[i], size = part.size(dim);
    const int64_t from = part.stride(dim) * unit, to = out.stride(dim) * unit;
    const bool outer = next < CopiedRuns::kDims;
    if (size == 1) continue;
    if (!outer && from == runs->run_bytes && to == runs->run_bytes) {
      runs->run_bytes *= size;
    } else if (outer && from == runs->from_stride[next] * runs->size[next] &&
               to == runs->to_stride[next] * runs->size[next]) {
      runs->size[next] *= size;
    } else if (next == 0) {
      return false;
    } else {
      --next;
      runs->size[next] = size;
      runs->from_stride[next] = from;
      runs->to_stride[next] = to;
    }
  }
  return true;
}

DType check_parts(const Tensor (&parts)[2], int64_t dim) {
  check_no_gradient({{kOp, kNames[0], parts[0]}, {kOp, kNames[1], parts[1]}});
  const Checked first{kOp, kNames[0], parts[0]}, second{kOp, kNames[1], parts[1]};
  first.in_place();
  second.in_place();
  const DType dtype = first.dtype(kEveryDType);
  second.dtype({dtype});
  bool alike = parts[1].dims() == parts[0].dims();
  for (int64_t i = 0; alike && i < parts[0].dims(); ++i) alike = i == dim || parts[1].size(i) == parts[0].size(i);
  if (!alike) {
    second.fail("expected the shape of first, ", parts[0].shape_text(), ", but along dimension ", dim, ", got ",
                parts[1].shape_text());
  }
  return dtype;
}

void run(const ConcatCall& call) {
  static Kernel<ConcatFn> kernel("concat", "f32");
  kernel(call);
}

Tensor concat(Stack stack) {
  Tensor parts[] = {stack.tensor(), stack.tensor()};
  const int64_t given = stack.integer(), dims = parts[0].dims();
  if (dims < 1 || dims > kMostDims) {
    fail(kOp, kNames[0], "expected 1 to ", kMostDims, " dimensions, got shape ", parts[0].shape_text());
  }
  const int64_t dim = dim_of(kOp, "dim", given, dims);
  const DType dtype = check_parts(parts, dim);

  const Order order = order_of(parts);
  int64_t sizes[kMostDims];
  for (int64_t i = 0; i < dims; ++i) sizes[i] = parts[0].size(i) + (i == dim ? parts[1].size(i) : 0);
  Tensor out = Tensor::empty_in_order(sizes, dims, dtype, order.dims);
  if (out.numel() == 0) return out;

  ConcatCall call{};
  call.to = out.mutable_data();
  call.unit = dtype_size(dtype);
  int64_t before = 0;
  for (int i = 0; i < 2; ++i) {
    if (!set_runs(parts[i], order, out, call.unit, &call.parts[i])) {
      parts[i] = parts[i].contiguous_copy();
      set_runs(parts[i], order, out, call.unit, &call.parts[i]);
    }
    call.parts[i].at = before * out.stride(dim) * call.unit;
    before += parts[i].size(dim);
  }
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    for (int i = 0; i < 2; ++i) noted->reads(call.parts[i].from, parts[i]);
    noted->writes(call.to, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &concat);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) { library.def("concat(Tensor first, Tensor second, int dim) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("concat", &boxed<concat>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("concat", &on_xpu<boxed<concat>>); }

}  // namespace xopt::ops
