// Parallel regions on the OpenMP runtime that torch has loaded. Compiled with -fopenmp and linked to no OpenMP library:
// a second runtime in the process would bring a second pool of threads and fight torch's for the cores.
#include "runtime/parallel.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <exception>
#include <vector>

#include "runtime/barrier.h"
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

// The first of the exceptions that threads throw.
class FirstException {
 public:
  void catch_current() {
    if (!failed_.test_and_set()) first_ = std::current_exception();
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
};

// What the threads of a region do, and what comes of it.
class Work {
 public:
  Work(ParallelBody body, void* context) : body_(body), context_(context) {}

  void run(int thread, int count) {
    const RegionScope scope(count);
    const Watch watch(traced_, &busy_, &members_);
    try {
      body_(context_, thread, count);
    } catch (...) {
      exception_.catch_current();
    }
  }
  // On the calling thread, when all are done.
  void finish() const {
    if (traced_) trace_region(start_, trace_clock(), busy_.load(), members_.load());
    exception_.rethrow();
  }

 private:
  const ParallelBody body_;
  void* const context_;
  const bool traced_ = tracing();
  const int64_t start_ = traced_ ? trace_clock() : 0;
  std::atomic<int64_t> busy_{0};
  std::atomic<int> members_{0};
  FirstException exception_;
};

// Threads of one region of OpenMP that wait for what the first of them has to share.
//
// A thread enters a piece of work by a door. Where others could do its part as well the first closes the door when all is
// done and waits for those inside, not for those to come: another process may have their cores for milliseconds.
class Team {
 public:
  int threads() const { return static_cast<int>(places_.size()); }

  // By the first thread: how many it is the first of, work for some of them, and the end.
  void gather(int threads) { places_ = std::vector<Place>(static_cast<size_t>(threads)); }
  void share(int threads, Comers comers, Work* work) {
    const int count = threads < this->threads() ? threads : this->threads();
    work_ = work;
    const uint64_t door = open(count);
    work->run(0, count);
    if (comers == Comers::some) door_.store(door | kClosed);
    for (int thread = 1; thread < count; ++thread) {
      const std::atomic<uint64_t>& state = places_[static_cast<size_t>(thread)].state;
      spin_until<kSpins>([&] {
        const uint64_t seen = state.load();
        return comers == Comers::some ? seen != door : seen == (door | kClosed);
      });
    }
  }
  void dismiss() { open(0); }

  // By each of the others, until the first has nothing more.
  void serve(int thread) {
    for (uint64_t door = 0;;) {
      const uint64_t phase = door >> kPhaseShift;
      spin_until<kSpins>([&] { return (door = door_.load()) >> kPhaseShift != phase; });
      const int count = static_cast<int>(door >> kCountShift & kMostCount);
      if (count == 0) return;
      if (thread >= count || (door & kClosed) != 0) continue;
      std::atomic<uint64_t>& state = places_[static_cast<size_t>(thread)].state;
      // Sequentially consistent: either the first sees who is inside, or that one sees the door closed.
      state.store(door);
      if (door_.load() == door) work_->run(thread, count);
      state.store(door | kClosed);
    }
  }

 private:
  static constexpr int kSpins = 256;  // regions follow each other within microseconds
  // The door's number says which work it leads to, for how many threads, and whether it is closed.
  static constexpr uint64_t kClosed = 1, kMostCount = 0xffff;
  static constexpr int kCountShift = 1, kPhaseShift = 17;

  // A thread's, a cache line each: the number of the door that it is inside of, and with kClosed when it has left.
  struct alignas(64) Place {
    std::atomic<uint64_t> state{0};
  };

  uint64_t open(int count) {
    const uint64_t phase = (door_.load(std::memory_order_relaxed) >> kPhaseShift) + 1;
    const uint64_t door = phase << kPhaseShift | static_cast<uint64_t>(count) << kCountShift;
    door_.store(door);
    return door;
  }

  std::vector<Place> places_;
  Work* work_ = nullptr;
  alignas(64) std::atomic<uint64_t> door_{0};
};

// The team that this thread is the first of.
thread_local Team* team = nullptr;

bool has_team() { return team != nullptr && region_threads == 0; }

}  // namespace

int max_threads() {
  if (has_team()) return team->threads();
  if (forked || region_threads > 0 || omp_in_parallel() != 0) return 1;
  const ThreadSource source = thread_source.load(std::memory_order_relaxed);
  const int threads = source != nullptr ? source() : omp_get_max_threads();
  return threads > 1 ? threads : 1;
}

bool in_region() { return !has_team() && (region_threads > 0 || omp_in_parallel() != 0); }

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

void parallel_run(int threads, Comers comers, ParallelBody body, void* context) {
  if (threads <= 1 || in_region() || forked) {
    const RegionScope scope(1);
    body(context, 0, 1);
    return;
  }
  Work work(body, context);
  if (has_team()) {
    team->share(threads, comers, &work);
    return work.finish();
  }
  // The team always has the same size, torch's. libgomp ends the threads that a smaller team does not need and starts
  // them anew for the next large one: with 16 threads that made a product of 80 us take 2 ms.
  const int team_size = threads > max_threads() ? threads : max_threads();
#pragma omp parallel num_threads(team_size) default(none) shared(threads, work)
  {
    const int granted = omp_get_num_threads();
    const int count = threads < granted ? threads : granted;
    const int thread = omp_get_thread_num();
    if (thread < count) work.run(thread, count);
  }
  work.finish();
}

void with_team_run(void (*body)(void* context), void* context) {
  const int threads = max_threads();
  if (threads <= 1 || has_team()) return body(context);
  FirstException exception;
  Team waiting;
#pragma omp parallel num_threads(threads) default(none) shared(body, context, exception, waiting)
  {
    const int thread = omp_get_thread_num();
    if (thread > 0) {
      waiting.serve(thread);
    } else {
      try {
        waiting.gather(omp_get_num_threads());
        team = &waiting;
        body(context);
      } catch (...) {
        exception.catch_current();
      }
      team = nullptr;
      waiting.dismiss();
    }
  }
  exception.rethrow();
}

}  // namespace xopt
