// Parallel regions on the OpenMP runtime that torch has loaded. Compiled with -fopenmp and linked to no OpenMP library:
// a second runtime in the process would bring a second pool of threads and fight torch's for the cores.
#include "runtime/parallel.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <exception>

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
class Team {
 public:
  int threads() const { return threads_; }

  // By the first thread: how many it is the first of, work for some of them, and the end.
  void gather(int threads) { threads_ = threads; }
  void share(int threads, Work* work) {
    count_ = threads < threads_ ? threads : threads_;
    work_ = work;
    done_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    work->run(0, count_);
    spin_until<kSpins>([&] { return done_.load(std::memory_order_acquire) == threads_ - 1; });
  }
  void dismiss() {
    work_ = nullptr;
    phase_.fetch_add(1, std::memory_order_release);
  }

  // By each of the others, until the first has nothing more.
  void serve(int thread) {
    for (unsigned phase = 1;; ++phase) {
      spin_until<kSpins>([&] { return phase_.load(std::memory_order_acquire) == phase; });
      if (work_ == nullptr) return;
      if (thread < count_) work_->run(thread, count_);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

 private:
  static constexpr int kSpins = 256;  // regions follow each other within microseconds

  int threads_ = 1;
  int count_ = 0;
  Work* work_ = nullptr;
  alignas(64) std::atomic<unsigned> phase_{0};
  alignas(64) std::atomic<int> done_{0};
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

void parallel_run(int threads, ParallelBody body, void* context) {
  if (threads <= 1 || in_region() || forked) {
    const RegionScope scope(1);
    body(context, 0, 1);
    return;
  }
  Work work(body, context);
  if (has_team()) {
    team->share(threads, &work);
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
      waiting.gather(omp_get_num_threads());
      team = &waiting;
      try {
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
