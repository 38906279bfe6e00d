// xopt::chain: calls of operators one after the other, on each other's results. To call one costs Python and torch as
// much as a convolution of a small image takes; here nothing but tensors is handed over and the rest is known from
// before.
#include <algorithm>
#include <chrono>

#include "ops/check.h"
#include "ops/conv_bands.h"
#include "ops/image_groups.h"
#include "ops/recorder.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "runtime/trace.h"

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
    if (!may_replay()) {
      run_all();
      return results_;
    }
    Addresses addresses{data_of(tensors_), results_};
    std::vector<int64_t> sizes = sizes_of(tensors_, threads_);
    if (const auto recording = prepared_.recordings->find(sizes, addresses.tensors)) {
      if (!run_again(*recording, &addresses)) {
        for (Tensor& result : results_) result = Tensor();
        run_all();
      }
    } else if (prepared_.recordings->come_again(sizes)) {
      record(std::move(sizes), nullptr);
    } else if (auto earlier = prepared_.recordings->run_like(sizes)) {
      record(std::move(sizes), std::move(earlier));
    } else {
      note_shapes_of(std::move(sizes));
      run_all();
      prepared_.recordings->ran(std::move(shapes_));
    }
    return results_;
  }

 private:
  // Under grad mode operators look whether somebody wants a gradient of what they have none for, and a profiler wants to
  // be told their names.
  bool may_replay() const { return on_cpu_ && !aoti_torch_grad_mode_is_enabled() && !tracing(); }

  void run_all() {
    for (size_t i = 0; i < prepared_.calls.size();) i = run_from(i);
  }

  void record(std::vector<int64_t> sizes, std::shared_ptr<const Shapes> earlier) {
    if (earlier) note_shapes_of(sizes);
    Joins joins = earlier ? Joins() : prepared_.recordings->joins(prepared_, tensors_, sizes);
    recorder_ = std::make_unique<Recorder>(prepared_, tensors_, std::move(sizes), std::move(earlier), std::move(joins));
    run_all();
    auto recording = recorder_->finish();
    if (!recording) return prepared_.recordings->keep_apart(recorder_->parts_to_keep_apart());
    if (!prepared_.recordings->add(std::move(recording))) prepared_.recordings->ran(std::move(shapes_));
  }
  void note_shapes_of(std::vector<int64_t> sizes) {
    shapes_ = std::make_shared<Shapes>();
    shapes_->tensors = std::move(sizes);
    shapes_->results.resize(results_.size());
  }

  // False where a call that is no part of the recording has given something else than in the recorded run.
  bool run_again(const Recording& recording, Addresses* addresses) {
    if (recording.image_groups.empty()) return run_steps(recording, addresses);
    addresses->apart = recording.images.apart();
    const auto begin = std::chrono::steady_clock::now();
    if (!run_steps(recording, addresses)) return false;
    const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin;
    recording.images.took(addresses->apart, taken.count());
    return true;
  }
  bool run_steps(const Recording& recording, Addresses* addresses) {
    const Tensor memory = Tensor::empty(&recording.block_bytes, 1, DType::u8);
    addresses->block = static_cast<const uint8_t*>(memory.data());
    const std::vector<RecordedStep>& steps = recording.steps;
    for (size_t i = 0; i < steps.size();) {
      size_t end = i;
      while (end < steps.size() && (!steps[end].noted.empty() || steps[end].is_view)) ++end;
      if (end > i) {
        run_in_team(recording, i, end, *addresses);
        i = end;
      } else {
        if (!run_step(steps[i++], *addresses)) return false;
      }
    }
    return true;
  }

  bool gave_what_is_expected(const RecordedStep& step) const {
    return std::all_of(step.expected.begin(), step.expected.end(),
                       [&](const auto& each) { return shape_of(results_[each.first]) == each.second; });
  }

  bool run_step(const RecordedStep& step, const Addresses& addresses) {
    if (step.noted.empty()) {
      run_part(step.begin, step.end, Unused::stay);
      if (!gave_what_is_expected(step)) return false;
    } else {
      replay(step, threads_, addresses);
    }
    drop(step.unused_after);
    return true;
  }
  void drop(const std::vector<size_t>& unused) {
    for (const size_t result : unused) results_[result] = Tensor();
  }

  void run_images(const std::vector<RecordedStep>& steps, const ImageGroup& group, const Addresses& addresses) {
    for (size_t i = group.begin; i < group.end; ++i) make_results(steps[i], addresses);
    for (int64_t first = 0; first < group.images; first += group.at_once) {
      const int64_t count = std::min(group.at_once, group.images - first);
      for (size_t i = group.begin; i < group.end; ++i) replay_images(steps[i], threads_, addresses, first, count);
    }
    for (size_t i = group.begin; i < group.end; ++i) drop(steps[i].unused_after);
  }

  // Steps that use no thread but by their kernels.
  void run_in_team(const Recording& recording, size_t begin, size_t end, const Addresses& addresses) {
    const std::vector<RecordedStep>& steps = recording.steps;
    const auto run = [&] {
      for (size_t i = begin; i < end;) {
        if (const ImageGroup* group = addresses.apart ? recording.group_at(i) : nullptr) {
          run_images(steps, *group, addresses);
          i = group->end;
          continue;
        }
        if (i + 1 < end) steps[i + 1].fetch();
        run_step(steps[i++], addresses);
      }
    };
    if (end - begin > 1) return with_team(run);
    run();
  }

  PreparedArguments arguments_of(size_t i) const {
    const PreparedCall& call = prepared_.calls[i];
    return {call.name, call.arguments, tensors_, results_, call.read_by_rows && on_cpu_};
  }

  // This call, and those that are run together with it; returns what comes next.
  size_t run_from(size_t i) {
    const PreparedCall& call = prepared_.calls[i];
    return on_cpu_ && call.run_length > 1 ? run_convs(i, std::min(i + call.run_length, i + PlannedConvs::kMost))
                                          : run_part(i, i + 1);
  }

  void run_call(size_t i) {
    const PreparedArguments arguments = arguments_of(i);
    const PreparedCall& call = prepared_.calls[i];
    Tensor* results = &results_[i * kMostResults];
    if (recorder_) {
      CallNotes notes;
      const WantedOutput wanted(recorder_->joins().place_of(i * kMostResults));
      call.run(Stack(&arguments), results);
      recorder_->ran(i, notes.take(), results_);
    } else {
      call.run(Stack(&arguments), results);
    }
    if (shapes_) note_shapes(i);
  }
  void note_shapes(size_t i) {
    for (size_t own = i * kMostResults; own < (i + 1) * kMostResults; ++own) {
      shapes_->results[own] = shape_of(results_[own]);
    }
  }

  // Convolutions, and pooling among them, of which each reads the one before's result: those up to `end`, or to where planning them ends.
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
  enum class Unused : uint8_t { go, stay };
  size_t run_part(size_t begin, size_t end, Unused unused = Unused::go) {
    const bool together = end - begin > 1 && run_together(begin, end);
    for (size_t i = begin; i < end; ++i) {
      if (!together) run_call(i);
      if (unused == Unused::go) drop(prepared_.calls[i].unused_after);
    }
    return end;
  }

  bool run_together(size_t begin, size_t end) {
    PlannedConvs planned(threads_);
    if (plan_convs(begin, end, &planned) != end || !planned.run()) return false;
    if (recorder_) recorder_->ran_together(begin, end);
    return true;
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
  const bool on_cpu_ = current_offload() == nullptr;
  std::vector<Tensor> results_;
  std::unique_ptr<Recorder> recorder_;  // where such tensors come again
  std::shared_ptr<Shapes> shapes_;      // where they may not have come before
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
