// What a profiler cannot see from outside: how long each thread of a parallel region worked, and the names (of
// activations, norms, ...) that operators were called with. Off, it costs one load and one branch a region and a name.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace xopt {

// Times are nanoseconds since 1970, as in the events of torch's profiler.
struct TraceEntry {
  static constexpr size_t kMostName = 47;

  int64_t start;
  int64_t end;
  int64_t busy;              // that all threads together spent in the region's body
  int caller;                // Linux's id of the thread that called
  int threads;               // that took part in the region; 0: this is a name; -1: this is the instance that runs
  char name[kMostName + 1];  // cut off where it is longer
};

extern std::atomic<bool> trace_switch;
inline bool tracing() { return trace_switch.load(std::memory_order_relaxed); }

int64_t trace_clock();
void trace_region(int64_t start, int64_t end, int64_t busy, int threads);
void trace_name(const char* text, size_t length);
void trace_instance(const char* text);

// Begins anew with no entries.
void start_trace();
void stop_trace();
size_t trace_size();
// Copies the entries from `first` on, at most `most`: how many. To be called after stop_trace.
size_t read_trace(size_t first, TraceEntry* entries, size_t most);
// Entries that there was no room for.
size_t trace_dropped();

}  // namespace xopt
