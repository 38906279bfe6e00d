// xopt::softmax: softmax over the last dimension.
#include "kernels/softmax.h"

#include "ops/gemm_arguments.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "softmax";

struct SoftmaxArguments {
  explicit SoftmaxArguments(Stack stack) : input(stack.tensor()), out_dtype(stack.optional_dtype_code()) {}

  Tensor input;
  std::optional<int32_t> out_dtype;
};

void run(const SoftmaxCall& call) {
  static Kernel<SoftmaxFn> kernel("softmax", "f32");
  kernel(call);
}

Tensor softmax(Stack stack) {
  SoftmaxArguments arguments{stack};
  Tensor& input = arguments.input;
  check_no_gradient({{kOp, "input", input}});
  SoftmaxCall call{};
  call.columns = input_features(kOp, input);
  call.rows = input_rows(input);
  call.input = rows_view(kOp, "input", &input, kFloating);
  call.out_dtype = output_dtype(kOp, arguments.out_dtype, input, kFloating);
  Tensor out = empty_output(kOp, input, call.columns, call.out_dtype);
  call.out = out.mutable_data();
  if (call.rows == 0 || call.columns == 0) return out;
  run(call);
  if (NotedCall* noted = note_call(&run, call)) {
    noted->reads(call.input.data, input);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &softmax);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("softmax(Tensor input, *, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("softmax", &boxed<softmax>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("softmax", &on_xpu<boxed<softmax>>); }

}  // namespace xopt::ops
