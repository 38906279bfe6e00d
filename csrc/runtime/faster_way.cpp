#include "runtime/faster_way.h"

#include <algorithm>
#include <chrono>

namespace xopt {
namespace {

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

FasterWay::Call FasterWay::begin() {
  const int decided = decided_.load(std::memory_order_relaxed);
  if (decided != kUndecided) return {decided, -1};
  const std::lock_guard<std::mutex> lock(mutex_);
  return {way_, ++calls_ > kSkipped ? now() : -1};
}

void FasterWay::end(const Call& call, double work) {
  if (call.start < 0) return;
  const auto took = static_cast<double>(now() - call.start);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (call.way != way_ || decided_.load(std::memory_order_relaxed) != kUndecided) return;
  time_ += took;
  work_ += work;
  if (calls_ >= kCallsOfStretch && work_ > 0) end_stretch();
}

void FasterWay::end_stretch() {
  slowness_[way_][stretches_ / 2] = time_ / work_;
  time_ = work_ = 0;
  calls_ = 0;
  way_ = 1 - way_;
  if (++stretches_ < 2 * kStretches) return;
  // Medians: a stretch may have been disturbed.
  for (auto& of_way : slowness_) std::nth_element(of_way, of_way + kStretches / 2, of_way + kStretches);
  decided_.store(slowness_[1][kStretches / 2] < slowness_[0][kStretches / 2] ? 1 : 0, std::memory_order_relaxed);
}

}  // namespace xopt
