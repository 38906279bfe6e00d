// Where some threads of one parallel region wait for each other, many times in a short while.
#pragma once

#include <sched.h>

#include <atomic>

namespace xopt {

// Waits awake for a few microseconds, and from then on lets others have the core: where there are fewer free cores than
// threads, the one that is waited for may need it.
template <int kSpins, class Done>
void spin_until(const Done& done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < kSpins) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}

class Barrier {
 public:
  // Returns when `members` threads have called it as often as this one. False: one of them gave up, and none may wait
  // for it any longer.
  bool wait(int members) {
    if (members > 1) {
      const unsigned phase = phase_.load(std::memory_order_acquire);
      if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
      } else {
        wait_while(phase);
      }
    }
    return !broken_.load(std::memory_order_acquire);
  }

  // Lets all who wait go, for a thread that cannot go on.
  void give_up() { broken_.store(true, std::memory_order_release); }

 private:
  void wait_while(unsigned phase) const {
    spin_until<64>(
        [&] { return phase_.load(std::memory_order_acquire) != phase || broken_.load(std::memory_order_relaxed); });
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace xopt
