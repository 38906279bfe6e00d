// Parallel regions on the OpenMP runtime that torch has loaded. Compiled with -fopenmp and linked to no OpenMP library:
// a second runtime in the process would bring a second pool of threads and fight torch's for the cores.
#include "runtime/parallel.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <exception>

#include "runtime/trace.h"

namespace xopt {
namespace {

std::atomic<ThreadSource> thread_source{nullptr};

// OpenMP's worker threads do not survive a fork, but its book-keeping does: a region in the child would wait for them
// forever. OpenMP does not tell whether it had any, and torch may have started them, so every forked child is serial.
bool forked = false;

[[gnu::constructor]] void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

// Threads of the region that this thread works in; 0 outside. A serial run inside a region counts as a region of 1.
thread_local int region_threads = 0;

class RegionScope {
 public:
  explicit RegionScope(int threads) : previous_(region_threads) { region_threads = threads; }
  ~RegionScope() { region_threads = previous_; }
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

 private:
  int previous_;
};

// Adds the time that one thread spends in a traced region's body.
class Watch {
 public:
  Watch(bool traced, std::atomic<int64_t>* busy, std::atomic<int>* members)
      : busy_(traced ? busy : nullptr), members_(members), start_(traced ? trace_clock() : 0) {}
  ~Watch() {
    if (busy_ == nullptr) return;
    busy_->fetch_add(trace_clock() - start_, std::memory_order_relaxed);
    members_->fetch_add(1, std::memory_order_relaxed);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  std::atomic<int64_t>* busy_;
  std::atomic<int>* members_;
  int64_t start_;
};

}  // namespace

int max_threads() {
  if (forked || region_threads > 0 || omp_in_parallel() != 0) return 1;
  const ThreadSource source = thread_source.load(std::memory_order_relaxed);
  const int threads = source != nullptr ? source() : omp_get_max_threads();
  return threads > 1 ? threads : 1;
}

bool in_region() { return region_threads > 0 || omp_in_parallel() != 0; }

int openmp_threads() { return omp_get_max_threads(); }

int openmp_place_cpus(int* cpus, int most) {
  int count = 0;
  for (int place = 0; place < omp_get_num_places(); ++place) {
    const int size = omp_get_place_num_procs(place);
    if (count + size <= most) omp_get_place_proc_ids(place, cpus + count);
    count += size;
  }
  return count;
}

const char* openmp_library() {
  Dl_info found;
  const bool known = dladdr(reinterpret_cast<const void*>(&omp_get_max_threads), &found) != 0;
  return known && found.dli_fname != nullptr ? found.dli_fname : "";
}

void set_thread_source(ThreadSource source) { thread_source.store(source, std::memory_order_relaxed); }

void enter_openmp() {
  if (forked || region_threads > 0 || omp_in_parallel() != 0) return;
  std::atomic<int> entered{0};
#pragma omp parallel num_threads(1) default(none) shared(entered)
  entered.fetch_add(1, std::memory_order_relaxed);
}

void parallel_run(int threads, ParallelBody body, void* context) {
  if (threads <= 1 || forked || region_threads > 0 || omp_in_parallel() != 0) {
    const RegionScope scope(1);
    body(context, 0, 1);
    return;
  }
  // The team always has the same size, torch's. libgomp ends the threads that a smaller team does not need and starts
  // them anew for the next large one: with 16 threads that made a product of 80 us take 2 ms.
  const int team = threads > max_threads() ? threads : max_threads();
  std::exception_ptr first;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  const bool traced = tracing();
  const int64_t start = traced ? trace_clock() : 0;
  std::atomic<int64_t> busy{0};
  std::atomic<int> members{0};
#pragma omp parallel num_threads(team) default(none) \
    shared(threads, body, context, first, failed, traced, busy, members)
  {
    const int granted = omp_get_num_threads();
    const int count = threads < granted ? threads : granted;
    const int thread = omp_get_thread_num();
    if (thread < count) {
      const RegionScope scope(count);
      const Watch watch(traced, &busy, &members);
      try {
        body(context, thread, count);
      } catch (...) {
        if (!failed.test_and_set()) first = std::current_exception();
      }
    }
  }
  if (traced) trace_region(start, trace_clock(), busy.load(), members.load());
  if (first) std::rethrow_exception(first);
}

}  // namespace xopt
