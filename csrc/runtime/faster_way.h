// Which of two ways to do calls is the faster one on this machine, found out by the first calls themselves. For ways whose
// results are the same, bit for bit, and of which nothing that a CPU tells of itself says which one it likes better.
//
// Calls take turns in stretches, not one by one: a way that leaves caches to others pays in the calls that follow.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace xopt {

class FasterWay {
 public:
  struct Call {
    int way = 0;         // 0 or 1
    int64_t start = -1;  // of one that is measured
  };
  Call begin();
  // `work`: how long the call should take, in any unit, if all calls were equally fast.
  void end(const Call& call, double work);

 private:
  static constexpr int kSkipped = 8;          // calls of a stretch, of which those before went the other way
  static constexpr int kCallsOfStretch = 64;  // a forward or so
  static constexpr int kStretches = 7;        // of each way
  static constexpr int kUndecided = -1;

  void end_stretch();

  std::atomic<int> decided_{kUndecided};
  std::mutex mutex_;  // guards what is below
  int way_ = 0, calls_ = 0, stretches_ = 0;
  double time_ = 0, work_ = 0;  // of the stretch
  double slowness_[2][kStretches] = {};
};

}  // namespace xopt
