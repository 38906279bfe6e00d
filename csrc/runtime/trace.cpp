// See trace.h.
#include "runtime/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <mutex>
#include <vector>

namespace xopt {

std::atomic<bool> trace_switch{false};

namespace {

constexpr size_t kMostEntries = size_t{1} << 20;

struct Trace {
  std::mutex lock;
  std::vector<TraceEntry> entries;
  size_t dropped = 0;
};

// Never destroyed: threads may still run kernels while the process ends.
Trace& trace() {
  static Trace& only = *new Trace;
  return only;
}

int thread_id() {
  thread_local const int id = static_cast<int>(syscall(SYS_gettid));
  return id;
}

void append(TraceEntry entry) {
  entry.caller = thread_id();
  Trace& all = trace();
  const std::lock_guard<std::mutex> held(all.lock);
  if (all.entries.size() < kMostEntries) {
    all.entries.push_back(entry);
  } else {
    ++all.dropped;
  }
}

TraceEntry named_entry(const char* text, size_t length) {
  TraceEntry entry{};
  entry.start = entry.end = trace_clock();
  std::memcpy(entry.name, text, std::min(length, TraceEntry::kMostName));
  return entry;
}

}  // namespace

int64_t trace_clock() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

void trace_region(int64_t start, int64_t end, int64_t busy, int threads) {
  TraceEntry entry{};
  entry.start = start;
  entry.end = end;
  entry.busy = busy;
  entry.threads = threads;
  append(entry);
}

void trace_name(const char* text, size_t length) { append(named_entry(text, length)); }

void trace_instance(const char* text) {
  TraceEntry entry = named_entry(text, std::strlen(text));
  entry.threads = -1;
  append(entry);
}

void start_trace() {
  Trace& all = trace();
  const std::lock_guard<std::mutex> held(all.lock);
  all.entries.clear();
  all.dropped = 0;
  trace_switch.store(true, std::memory_order_relaxed);
}

void stop_trace() { trace_switch.store(false, std::memory_order_relaxed); }

size_t trace_size() {
  Trace& all = trace();
  const std::lock_guard<std::mutex> held(all.lock);
  return all.entries.size();
}

size_t read_trace(size_t first, TraceEntry* entries, size_t most) {
  Trace& all = trace();
  const std::lock_guard<std::mutex> held(all.lock);
  const size_t count = first < all.entries.size() ? std::min(most, all.entries.size() - first) : 0;
  std::copy_n(all.entries.begin() + static_cast<std::ptrdiff_t>(first), count, entries);
  return count;
}

size_t trace_dropped() {
  Trace& all = trace();
  const std::lock_guard<std::mutex> held(all.lock);
  return all.dropped;
}

}  // namespace xopt
