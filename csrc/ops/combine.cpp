// xopt::combine: the sum, difference or product of two tensors, broadcast as torch does it, and a relu of that.
#include "kernels/combine.h"

#include "ops/broadcast.h"
#include "ops/joins.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "combine";
constexpr NamedValue<Combine> kHow[] = {{"add", Combine::add}, {"sub", Combine::sub}, {"mul", Combine::mul}};
static_assert(CombineCall::kDims == kBroadcastDims);

struct CombineArguments {
  explicit CombineArguments(Stack stack)
      : first(stack.tensor()), second(stack.tensor()), how(stack.string()), relu(stack.boolean()) {}

  Tensor first, second;
  String how;
  bool relu;
};

// Whether a result is an image of several channels, which are last in memory.
bool is_image(const Dims& sizes, const Dims& order) {
  bool in_order = sizes.count >= 4 && sizes.values[1] > 1 && order.values[0] == 0 && order.values[sizes.count - 1] == 1;
  for (int64_t i = 1; in_order && i + 1 < sizes.count; ++i) in_order = order.values[i] == i + 1;
  return in_order;
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
  const Lying parts[] = {Lying::of(one), Lying::of(other)};
  Dims sizes;
  if (!broadcast(parts[0].sizes, parts[1].sizes, &sizes)) {
    other.fail("expected a shape that goes with that of first, ", first.shape_text(), ", got ", second.shape_text());
  }
  const Dims order = order_of(parts[0], parts[1], sizes);
  Tensor out = is_image(sizes, order) ? WantedOutput::take(sizes.values, sizes.count, call.dtype)
                                      : Tensor::empty_in_order(sizes.values, sizes.count, call.dtype, order.values);
  if (out.numel() == 0) return out;
  const Lying lying[] = {parts[0], parts[1], Lying::of({kOp, "out", out})};
  set_loops(lying, 3, sizes, order, call.size, {call.parts[0].stride, call.parts[1].stride, call.out_stride});
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
