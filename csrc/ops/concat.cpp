// xopt::concat: tensors one after the other along a dimension, as torch.cat gives them.
#include "kernels/concat.h"

#include <algorithm>
#include <iterator>

#include "ops/check.h"
#include "ops/joins.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "concat";
constexpr int64_t kMostParts = ConcatCall::kMostParts;
constexpr const char* kNames[] = {"tensors[0]", "tensors[1]", "tensors[2]", "tensors[3]",
                                  "tensors[4]", "tensors[5]", "tensors[6]", "tensors[7]"};
static_assert(std::size(kNames) == kMostParts);
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
Order order_of(const Tensors& parts) {
  bool channels_last = true;
  for (int64_t i = 0; i < parts.size(); ++i) channels_last = channels_last && is_like_channels_last(parts[i]);
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

DType check_parts(const Tensors& parts, int64_t dim) {
  const Tensor& first = parts[0];
  DType dtype = DType::f32;
  for (int64_t i = 0; i < parts.size(); ++i) {
    const Tensor& part = parts[i];
    const Checked checked{kOp, kNames[i], part};
    check_no_gradient({checked});
    checked.in_place();
    dtype = i == 0 ? checked.dtype(kEveryDType) : checked.dtype({dtype});
    bool alike = part.dims() == first.dims();
    for (int64_t j = 0; alike && j < first.dims(); ++j) alike = j == dim || part.size(j) == first.size(j);
    if (!alike) {
      checked.fail("expected the shape of tensors[0], ", first.shape_text(), ", but along dimension ", dim, ", got ",
                   part.shape_text());
    }
  }
  return dtype;
}

// Whether a part was computed where it goes (joins.h).
bool lies_at(const Tensor& part, const Tensor& out, int64_t at) {
  bool alike = part.data() == static_cast<const uint8_t*>(out.data()) + at;
  for (int64_t dim = 0; alike && dim < out.dims(); ++dim) {
    alike = part.size(dim) == 1 || part.stride(dim) == out.stride(dim);
  }
  return alike;
}

void run(const ConcatCall& call) {
  static Kernel<ConcatFn> kernel("concat", "f32");
  if (call.count > 0) kernel(call);
}

struct ConcatArguments {
  explicit ConcatArguments(Stack stack) : tensors(stack.tensors()), dim(stack.integer()) {}

  Tensors tensors;
  int64_t dim;
};

Tensor concat(Stack stack) {
  ConcatArguments arguments{stack};
  Tensors& parts = arguments.tensors;
  if (parts.size() < 1 || parts.size() > kMostParts) {
    fail(kOp, "tensors", "expected 1 to ", kMostParts, " tensors, got ", parts.size());
  }
  const int64_t dims = parts[0].dims();
  if (dims < 1 || dims > kMostDims) {
    fail(kOp, kNames[0], "expected 1 to ", kMostDims, " dimensions, got shape ", parts[0].shape_text());
  }
  const int64_t dim = dim_of(kOp, "dim", arguments.dim, dims);
  const DType dtype = check_parts(parts, dim);

  const Order order = order_of(parts);
  int64_t sizes[kMostDims];
  std::copy_n(parts[0].sizes(), dims, sizes);
  for (int64_t i = 1; i < parts.size(); ++i) sizes[dim] += parts[i].size(dim);
  Tensor out = order.dims[dims - 1] == 1 ? WantedOutput::take(sizes, dims, dtype)
                                         : Tensor::empty_in_order(sizes, dims, dtype, order.dims);
  if (out.numel() == 0) return out;

  ConcatCall call{};
  call.to = out.mutable_data();
  call.unit = dtype_size(dtype);
  int64_t before = 0;
  const Tensor* copied[kMostParts];
  for (int64_t i = 0; i < parts.size(); ++i) {
    const int64_t at = before * out.stride(dim) * call.unit;
    before += parts[i].size(dim);
    if (lies_at(parts[i], out, at)) continue;
    CopiedRuns& runs = call.parts[call.count];
    if (!set_runs(parts[i], order, out, call.unit, &runs)) {
      parts[i] = parts[i].contiguous_copy();
      set_runs(parts[i], order, out, call.unit, &runs);
    }
    runs.at = at;
    copied[call.count++] = &parts[i];
  }
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    for (int i = 0; i < call.count; ++i) noted->reads(call.parts[i].from, *copied[i]);
    noted->writes(call.to, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &concat);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) { library.def("concat(Tensor[] tensors, int dim) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("concat", &boxed<concat>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("concat", &on_xpu<boxed<concat>, First::list>); }

}  // namespace xopt::ops
