#include "runtime/shared_parts.h"

#include <atomic>
#include <new>

namespace xopt {

// A cache line each: threads write to their own most of the time.
struct alignas(64) SharedParts::Part {
  std::atomic<int64_t> next;
  int64_t end;
};

SharedParts::SharedParts(int64_t parts, int64_t least)
    : parts_(parts), least_(least > 1 ? least : 1), memory_(static_cast<size_t>(parts) * sizeof(Part)) {}

void SharedParts::set(int64_t part, int64_t begin, int64_t end) {
  Part* made = new (memory_.as<Part>() + part) Part;
  made->next.store(begin, std::memory_order_relaxed);
  made->end = end;
}

void SharedParts::deal(int64_t units) {
  for (int64_t part = 0; part < parts_; ++part) set(part, units * part / parts_, units * (part + 1) / parts_);
}

bool SharedParts::take(int64_t part, int threads, int64_t* begin, int64_t* end) {
  Part& from = memory_.as<Part>()[part];
  int64_t next = from.next.load(std::memory_order_relaxed), size = 0;
  do {
    const int64_t left = from.end - next;
    if (left <= 0) return false;
    size = (left + 1) / 2 > least_ ? (left + 1) / 2 : least_;
    // Alone, or with too little left for another piece: all of it.
    if (threads == 1 || left - size < least_) size = left;
    // Nothing is handed over but the numbers: the region's end is what makes results visible.
  } while (!from.next.compare_exchange_weak(next, next + size, std::memory_order_relaxed));
  *begin = next;
  *end = next + size;
  return true;
}

}  // namespace xopt
