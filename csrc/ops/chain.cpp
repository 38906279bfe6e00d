// xopt::chain: calls of operators one after the other, on each other's results. To call one costs Python and torch as
// much as a convolution of a small image takes; here nothing but tensors is handed over and the rest is known from
// before.
#include <algorithm>

#include "ops/check.h"
#include "ops/conv_bands.h"
#include "ops/prepared.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"

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
    const bool on_cpu = current_offload() == nullptr;
    for (size_t i = 0; i < prepared_.calls.size();) {
      const PreparedCall& call = prepared_.calls[i];
      const bool may_band = on_cpu && call.run_length > 1 && call.name == "conv";
      i = may_band ? run_convs(i, std::min(i + call.run_length, i + PlannedConvs::kMost)) : run_part(i, i + 1);
    }
    return results_;
  }

 private:
  PreparedArguments arguments_of(size_t i) const {
    return {prepared_.calls[i].name, prepared_.calls[i].arguments, tensors_, results_};
  }

  void run_call(size_t i) {
    const PreparedArguments arguments = arguments_of(i);
    prepared_.calls[i].run(Stack(&arguments), &results_[i * kMostResults]);
  }

  // Convolutions of which each reads the one before's result: those up to `end`, or to where planning them ends.
  // Returns what comes next. How many were best done together is noted for the next call with such an input.
  size_t run_convs(size_t begin, size_t end) {
    const uint64_t input = input_key(begin), note = prepared_.notes[begin].load(std::memory_order_relaxed);
    if (note / kCounts == input) return run_part(begin, begin + note % kCounts);
    std::vector<size_t> ends;
    {
      PlannedConvs planned(threads_);
      end = plan_convs(begin, end, &planned);
      ends = planned.parts();
      if (end > begin) results_[(end - 1) * kMostResults] = Tensor();
    }
    if (ends.empty()) return run_part(begin, begin + 1);
    size_t next = begin;
    for (const size_t part_end : ends) {
      const uint64_t count = begin + part_end - next;
      prepared_.notes[next].store(input_key(next) * kCounts + count, std::memory_order_relaxed);
      next = run_part(next, begin + part_end);
    }
    return next;
  }

  // Calls [begin, end), together if that is possible with these inputs; returns `end`.
  size_t run_part(size_t begin, size_t end) {
    bool together = false;
    if (end - begin > 1) {
      PlannedConvs planned(threads_);
      together = plan_convs(begin, end, &planned) == end && planned.run();
    }
    for (size_t i = begin; i < end; ++i) {
      if (!together) run_call(i);
      for (const size_t unused : prepared_.calls[i].unused_after) results_[unused] = Tensor();
    }
    return end;
  }

  // Up to one that has no outputs, or whose result is too small. Of the results, the last one's is there.
  size_t plan_convs(size_t begin, size_t end, PlannedConvs* planned) {
    for (size_t i = begin; i < end; ++i) {
      run_call(i);
      if (planned->size() == i - begin) return i;
      if (i > begin) results_[(i - 1) * kMostResults] = Tensor();
      if (!planned->may_go_on()) return i + 1;
    }
    return end;
  }

  // Of what decides how many convolutions are best done together; never 0.
  uint64_t input_key(size_t i) const {
    const PreparedArguments arguments = arguments_of(i);
    const Tensor input = Stack(&arguments).tensor();
    uint64_t key = static_cast<uint64_t>(threads_) * 31 + static_cast<uint64_t>(input.dtype_code());
    for (int64_t dim = 0; dim < input.dims(); ++dim) key = key * 1'000'003 + static_cast<uint64_t>(input.size(dim));
    return key % (UINT64_MAX / kCounts - 1) + 1;
  }

  static constexpr uint64_t kCounts = 16;  // more than are planned together
  static_assert(PlannedConvs::kMost < kCounts);

  const PreparedCalls& prepared_;
  const Tensors& tensors_;
  const int64_t threads_ = max_threads();
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
