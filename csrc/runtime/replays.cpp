#include "runtime/replays.h"

#include <atomic>

namespace xopt {
namespace {

std::atomic<int64_t> calls{0};

}  // namespace

void count_replayed_calls(int64_t count) { calls.fetch_add(count, std::memory_order_relaxed); }
int64_t replayed_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace xopt
