// xopt::combine: the sum, difference or product of two tensors, broadcast as torch does it, and a relu of that.
#include "kernels/combine.h"

#include <algorithm>
#include <utility>

#include "ops/check.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "combine";
constexpr int kDims = CombineCall::kDims;
constexpr NamedValue<Combine> kHow[] = {{"add", Combine::add}, {"sub", Combine::sub}, {"mul", Combine::mul}};
static_assert(kDims == Integers::kMost);

struct CombineArguments {
  explicit CombineArguments(Stack stack)
      : first(stack.tensor()), second(stack.tensor()), how(stack.string()), relu(stack.boolean()) {}

  Tensor first, second;
  String how;
  bool relu;
};

// Sizes of the result, or dimensions in some order.
struct Dims {
  int64_t values[kDims] = {};
  int64_t count = 0;
};

Dims broadcast(const Tensor& first, const Tensor& second) {
  Dims sizes;
  sizes.count = std::max(first.dims(), second.dims());
  if (sizes.count > kDims) {
    const bool is_first = first.dims() == sizes.count;
    fail(kOp, is_first ? "first" : "second", "expected at most ", kDims, " dimensions, got shape ",
         (is_first ? first : second).shape_text());
  }
  for (int64_t from_last = 1; from_last <= sizes.count; ++from_last) {
    const int64_t one = from_last <= first.dims() ? first.size(first.dims() - from_last) : 1;
    const int64_t other = from_last <= second.dims() ? second.size(second.dims() - from_last) : 1;
    if (one != other && one != 1 && other != 1) {
      fail(kOp, "second", "expected a shape that goes with that of first, ", first.shape_text(), ", got ",
           second.shape_text());
    }
    sizes.values[sizes.count - from_last] = one == 1 ? other : one;
  }
  return sizes;
}

int64_t stride_of(const Tensor& part, const Dims& sizes, int64_t dim) {
  const int64_t own = dim - (sizes.count - part.dims());
  return own < 0 || part.size(own) == 1 ? 0 : part.stride(own);
}

// Whether a dimension lies within another in memory: -1 or 1 by the first part that is broadcast along neither.
int compare_dims(const Tensor& first, const Tensor& second, const Dims& sizes, int64_t one, int64_t other) {
  for (const Tensor* part : {&first, &second}) {
    const int64_t inner = stride_of(*part, sizes, one), outer = stride_of(*part, sizes, other);
    if (inner == 0 || outer == 0) continue;
    if (inner != outer) return inner < outer ? -1 : 1;
    if (sizes.values[one] > sizes.values[other]) return 1;
  }
  return 0;
}

// As torch has it: dimensions from the outermost in memory to the innermost, sorted from the last on by insertion.
Dims order_of(const Tensor& first, const Tensor& second, const Dims& sizes) {
  Dims order;
  order.count = sizes.count;
  for (int64_t i = 0; i < order.count; ++i) {
    int64_t at = order.count - 1 - i;
    order.values[at] = at;
    for (int64_t inner = at + 1; inner < order.count; ++inner) {
      const int compared = compare_dims(first, second, sizes, order.values[inner], order.values[at]);
      if (compared < 0) break;
      if (compared == 0) continue;
      std::swap(order.values[inner], order.values[at]);
      at = inner;
    }
  }
  return order;
}

// Dimensions that lie alike in both parts as one.
void set_dims(const Tensor& first, const Tensor& second, const Dims& sizes, const Dims& order, CombineCall* call) {
  std::fill_n(call->size, kDims, 1);
  int at = kDims;
  for (int64_t i = order.count - 1; i >= 0; --i) {
    const int64_t dim = order.values[i], size = sizes.values[dim];
    const int64_t strides[] = {stride_of(first, sizes, dim), stride_of(second, sizes, dim)};
    if (size == 1) continue;
    const auto goes_on = [&](int part) { return strides[part] == call->parts[part].stride[at] * call->size[at]; };
    if (at < kDims && goes_on(0) && goes_on(1)) {
      call->size[at] *= size;
      continue;
    }
    call->size[--at] = size;
    for (int part = 0; part < 2; ++part) call->parts[part].stride[at] = strides[part];
  }
}

void run(const CombineCall& call) {
  static Kernel<CombineFn> kernel("combine", "f32");
  kernel(call);
}

Tensor combine(Stack stack) {
  const CombineArguments arguments{stack};
  const Tensor &first = arguments.first, &second = arguments.second;
  const Checked one{kOp, "first", first}, other{kOp, "second", second};
  check_no_gradient({one, other});
  one.in_place();
  other.in_place();
  CombineCall call{};
  call.dtype = one.dtype(kFloating);
  other.dtype({call.dtype});
  call.how = parse_name(kOp, "how", arguments.how.text(), kHow);
  call.relu = arguments.relu;
  const Dims sizes = broadcast(first, second), order = order_of(first, second, sizes);
  Tensor out = Tensor::empty_in_order(sizes.values, sizes.count, call.dtype, order.values);
  if (out.numel() == 0) return out;
  set_dims(first, second, sizes, order, &call);
  call.parts[0].data = first.data();
  call.parts[1].data = second.data();
  call.out = out.mutable_data();
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.parts[0].data, first);
    noted->reads(call.parts[1].data, second);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &combine);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("combine(Tensor first, Tensor second, str how, bool relu=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("combine", &boxed<combine>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("combine", &on_xpu<boxed<combine>>); }

}  // namespace xopt::ops
