// Threads. The OpenMP runtime is the one that torch has loaded; kernels never use a pragma of their own, so that all
// knowledge of OpenMP, nesting, fork and exceptions stands in parallel.cpp.
#pragma once

namespace xopt {

// How many threads a kernel called now may use: what torch.set_num_threads said; 1 inside a parallel region and in a
// forked child, where the runtime's worker threads no longer exist.
int max_threads();

// Whether this thread works in a region, be it one of a single thread.
bool in_region();

// Whoever knows torch's own setting says so: torch applies it to a Python thread only when that thread first runs a
// parallel torch op, so OpenMP's count alone would ignore it there. Not called in a region. nullptr: OpenMP's count.
using ThreadSource = int (*)();
void set_thread_source(ThreadSource source);

// OpenMP's own count of threads for the next region of this thread: torch's count, where both use the same runtime.
int openmp_threads();
// The CPUs of OpenMP's places, of which at most `most` are written: how many there are.
int openmp_place_cpus(int* cpus, int most);
// Path of the OpenMP runtime that regions here run on; "" where the loader does not tell.
const char* openmp_library();

// Makes the OpenMP runtime do for this thread what it does in a thread's first region, and never again: libiomp5 sets
// the thread's CPU mask back to the process's.
void enter_openmp();

// Runs body(context, thread, count) on `threads` threads and waits. `count`, the same for all, may be less than
// `threads` where the runtime grants fewer: divide the work by it. The first exception is thrown again here.
// Small `threads` save no time of the others: a region always wakes all of max_threads() (parallel.cpp says why).
enum class Comers { all, some };  // who has to
using ParallelBody = void (*)(void* context, int thread, int count);
void parallel_run(int threads, Comers comers, ParallelBody body, void* context);

// The same with a callable: body(thread, count).
template <class Body>
void parallel(int threads, const Body& body, Comers comers = Comers::all) {
  auto call = [](void* context, int thread, int count) { (*static_cast<const Body*>(context))(thread, count); };
  parallel_run(threads, comers, call, const_cast<Body*>(&body));
}

// For a body in which threads take work from each other until none is left (SharedParts): in with_team a thread that has
// not come when all is done is not waited for, since another process may have its core for milliseconds.
template <class Body>
void parallel_for_some(int threads, const Body& body) {
  parallel(threads, body, Comers::some);
}

// Runs body() on this thread, and the other threads wait in one region of OpenMP for the regions in it: to begin and end
// such a one takes 0.5 us, and 1.3 where OpenMP does it (two threads). For regions within microseconds of each other, and
// for nothing that uses OpenMP by itself, which would find itself in a region.
void with_team_run(void (*body)(void* context), void* context);
template <class Body>
void with_team(const Body& body) {
  with_team_run([](void* context) { (*static_cast<const Body*>(context))(); }, const_cast<Body*>(&body));
}

}  // namespace xopt
