// xopt::chain: calls of operators one after the other, on each other's results. To call one costs Python and torch as much
// as a convolution of a small image takes; here nothing but tensors is handed over and the rest is known from before.
#include "ops/check.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

struct ChainArguments {
  explicit ChainArguments(Stack stack) : tensors(stack.tensors()), calls(stack.string()) {}

  Tensors tensors;
  String calls;
};

std::vector<Tensor> run(const PreparedCalls& prepared, const Tensors& tensors) {
  std::vector<Tensor> results(prepared.calls.size() * kMostResults);
  for (size_t i = 0; i < prepared.calls.size(); ++i) {
    const PreparedCall& call = prepared.calls[i];
    const PreparedArguments arguments{call.name, call.arguments, tensors, results};
    call.run(Stack(&arguments), &results[i * kMostResults]);
    for (const size_t unused : call.unused_after) results[unused] = Tensor();
  }
  return results;
}

void chain(StableIValue* stack, uint64_t, uint64_t) {
  const ChainArguments arguments{Stack(stack)};
  const std::shared_ptr<const PreparedCalls> prepared = prepared_calls(arguments.calls.text());
  const std::vector<Tensor> results = run(*prepared, arguments.tensors);
  StableListHandle returned = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(prepared->returned.size(), &returned));
  for (const size_t result : prepared->returned) {
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(returned, torch::stable::detail::from(results[result].share())));
  }
  stack[0] = torch::stable::detail::from(returned);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) { library.def("chain(Tensor[] tensors, str calls) -> Tensor[]"); }

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("chain", &chain); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("chain", &on_xpu<chain, First::list>); }

}  // namespace xopt::ops
