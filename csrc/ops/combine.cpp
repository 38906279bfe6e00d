// xopt::combine: the sum, difference or product of two tensors, broadcast as torch does it, and a relu of that.
#include "kernels/combine.h"

#include "ops/broadcast.h"
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
  Tensor out = Tensor::empty_in_order(sizes.values, sizes.count, call.dtype, order.values);
  if (out.numel() == 0) return out;
  set_loops(parts, 2, sizes, order, call.size, {call.parts[0].stride, call.parts[1].stride});
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
