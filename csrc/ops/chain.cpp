// xopt::chain: calls of operators one after the other, on each other's results. To call one costs Python and torch as much
// as a convolution of a small image takes; here nothing but tensors is handed over and the rest is known from before.
#include <algorithm>

#include "ops/check.h"
#include "ops/conv_bands.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

struct ChainArguments {
  explicit ChainArguments(Stack stack) : tensors(stack.tensors()), calls(stack.string()) {}

  Tensors tensors;
  String calls;
};

class Run {
 public:
  Run(const PreparedCalls& prepared, const Tensors& tensors)
      : prepared_(prepared), tensors_(tensors), results_(prepared.calls.size() * kMostResults) {}

  const std::vector<Tensor>& results() {
    const bool may_band = PlannedConvs::could_pay();
    size_t i = 0;
    while (i < prepared_.calls.size()) {
      const PreparedCall& call = prepared_.calls[i];
      if (may_band && call.run_length > 1 && call.name == "conv") {
        i = call_convs(i, std::min(i + call.run_length, i + PlannedConvs::kMost));
      } else {
        this->call(i);
        forget_after(i++);
      }
    }
    return results_;
  }

 private:
  void call(size_t i) {
    const PreparedCall& call = prepared_.calls[i];
    const PreparedArguments arguments{call.name, call.arguments, tensors_, results_};
    call.run(Stack(&arguments), &results_[i * kMostResults]);
  }

  void forget_after(size_t i) {
    for (const size_t unused : prepared_.calls[i].unused_after) results_[unused] = Tensor();
  }

  // Convolutions of which each reads the one before's result: those up to `end`, or to where planning them ends. Returns
  // what comes next.
  size_t call_convs(size_t begin, size_t end) {
    std::vector<size_t> ends;
    {
      PlannedConvs planned;
      end = plan_convs(begin, end, &planned);
      ends = planned.parts();
      if (ends.size() <= 1) {
        if (!ends.empty()) planned.run();  // one without outputs was not planned, and is complete
        return forget(begin, std::max(end, begin + 1));
      }
      results_[(end - 1) * kMostResults] = Tensor();
    }
    size_t first = begin;
    for (const size_t last : ends) {
      first = call_part(first, begin + last);
    }
    return end;
  }

  size_t call_part(size_t begin, size_t end) {
    if (end - begin == 1) {
      call(begin);
    } else {
      PlannedConvs planned;
      plan_convs(begin, end, &planned);
      planned.run();
    }
    return forget(begin, end);
  }

  // Up to one that cannot be planned, since it reads a copy of what has not been computed yet. Of the results, the last
  // one's is there.
  size_t plan_convs(size_t begin, size_t end, PlannedConvs* planned) {
    for (size_t i = begin; i < end; ++i) {
      call(i);
      Tensor* input = i > begin ? &results_[(i - 1) * kMostResults] : nullptr;
      if (planned->size() == i - begin) return i;
      if (input != nullptr && planned->last_input() != input->data()) {
        planned->drop_last();
        return i;
      }
      if (input != nullptr) *input = Tensor();
      if (!planned->may_go_on()) return i + 1;
    }
    return end;
  }

  size_t forget(size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) forget_after(i);
    return end;
  }

  const PreparedCalls& prepared_;
  const Tensors& tensors_;
  std::vector<Tensor> results_;
};

void chain(StableIValue* stack, uint64_t, uint64_t) {
  const ChainArguments arguments{Stack(stack)};
  const std::shared_ptr<const PreparedCalls> prepared = prepared_calls(arguments.calls.text());
  Run run(*prepared, arguments.tensors);
  const std::vector<Tensor>& results = run.results();
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
