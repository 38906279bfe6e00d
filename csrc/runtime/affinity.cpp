// The team binds itself: one region in which each thread asks for, and sets, its own mask.
#include "runtime/affinity.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "runtime/parallel.h"

namespace xopt {
namespace {

// Linux takes masks of any size; this is more than any machine has CPUs.
constexpr int kMostCpus = 8192;

class CpuMask {
 public:
  CpuMask() : bits_(CPU_ALLOC_SIZE(kMostCpus) / sizeof(cpu_set_t) + 1) {}

  explicit CpuMask(const std::vector<int>& cpus) : CpuMask() {
    for (const int cpu : cpus) {
      if (cpu < 0 || cpu >= kMostCpus) throw std::invalid_argument("CPU " + std::to_string(cpu) + " cannot be");
      CPU_SET_S(static_cast<size_t>(cpu), bytes(), bits_.data());
    }
  }

  static CpuMask of_this_thread() {
    CpuMask mask;
    if (sched_getaffinity(0, mask.bytes(), mask.bits_.data()) != 0) fail("sched_getaffinity");
    return mask;
  }

  void bind_this_thread() const {
    if (sched_setaffinity(0, bytes(), bits_.data()) != 0) fail("sched_setaffinity");
  }

  std::vector<int> cpus() const {
    const size_t count = static_cast<size_t>(CPU_COUNT_S(bytes(), bits_.data()));
    std::vector<int> set;
    for (int cpu = 0; set.size() < count; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes(), bits_.data())) set.push_back(cpu);
    }
    return set;
  }

 private:
  [[noreturn]] static void fail(const char* call) { throw std::system_error(errno, std::generic_category(), call); }
  size_t bytes() const { return bits_.size() * sizeof(cpu_set_t); }

  std::vector<cpu_set_t> bits_;
};

// Runs body(its place in the result) on each thread of the team, and returns the result.
template <class Body>
std::vector<ThreadMask> on_team(const Body& body) {
  const int wanted = max_threads();
  std::vector<ThreadMask> team(static_cast<size_t>(wanted));
  int granted = 0;
  parallel(wanted, [&](int thread, int count) {
    if (thread == 0) granted = count;
    body(team[static_cast<size_t>(thread)]);
  });
  team.resize(static_cast<size_t>(granted));
  return team;
}

ThreadMask mask_of_this_thread() { return {static_cast<int>(syscall(SYS_gettid)), CpuMask::of_this_thread().cpus()}; }

}  // namespace

std::vector<ThreadMask> bind_team(const std::vector<int>& cpus, const std::map<int, std::vector<int>>& exceptions) {
  const CpuMask common(cpus);
  std::map<int, CpuMask> own;
  for (const auto& [thread_id, mask] : exceptions) own.emplace(thread_id, CpuMask(mask));
  const CpuMask of_caller = CpuMask::of_this_thread();
  enter_openmp();
  of_caller.bind_this_thread();
  return on_team([&](ThreadMask& before) {
    before = mask_of_this_thread();
    const auto found = own.find(before.thread_id);
    (found == own.end() ? common : found->second).bind_this_thread();
  });
}

std::vector<int> openmp_cpus() {
  std::vector<int> cpus(static_cast<size_t>(openmp_place_cpus(nullptr, 0)));
  openmp_place_cpus(cpus.data(), static_cast<int>(cpus.size()));
  return cpus;
}

std::vector<ThreadMask> team_masks() {
  return on_team([](ThreadMask& mask) { mask = mask_of_this_thread(); });
}

}  // namespace xopt
