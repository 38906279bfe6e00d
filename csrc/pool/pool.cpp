// The pool: extents behind a lock, with a limit and counters. Its state is there before any constructor runs, since
// malloc is called before them.
#include "pool/pool.h"

#include <pthread.h>

#include <atomic>
#include <cerrno>

#include "pool/blocks.h"
#include "pool/extents.h"

namespace xopt_pool {
namespace {

Extents extents;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
std::atomic<bool> enabled{false};
// Set once the address space is reserved: until then no block can be the pool's.
std::atomic<bool> reserved{false};
uint64_t max_bytes = UINT64_MAX;
uint64_t peak = 0;
uint64_t hits = 0, misses = 0, refused = 0;

class Lock {
 public:
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

// Callers of malloc and free do not expect errno to change where all went well.
class ErrnoScope {
 public:
  ErrnoScope() : saved_(errno) {}
  ~ErrnoScope() { errno = saved_; }
  ErrnoScope(const ErrnoScope&) = delete;
  ErrnoScope& operator=(const ErrnoScope&) = delete;

 private:
  int saved_;
};

// Handlers before a fork run in the reverse order of their registration. This library is loaded with the program, so its
// lock is taken after the handlers of what is loaded later have run, which may allocate, and is free again before those.
[[gnu::constructor]] void start() {
  pthread_atfork([] { pthread_mutex_lock(&mutex); }, [] { pthread_mutex_unlock(&mutex); },
                 [] { pthread_mutex_unlock(&mutex); });
  xopt_pool_set(1, UINT64_MAX);
}

}  // namespace

bool is_on() { return enabled.load(std::memory_order_relaxed); }

bool owns(const void* address) { return reserved.load(std::memory_order_acquire) && extents.owns(address); }

void* take(size_t bytes) {
  const ErrnoScope scope;
  const Lock lock;
  bool fresh = false;
  void* block = extents.take(bytes, max_bytes, &fresh);
  if (block == nullptr) {
    ++refused;
    return nullptr;
  }
  ++(fresh ? misses : hits);
  if (extents.live_bytes() > peak) peak = extents.live_bytes();
  return block;
}

bool release(void* block) {
  const Lock lock;
  return extents.release(block);
}

size_t size_of(const void* block) {
  const Lock lock;
  return extents.size_of(block);
}

}  // namespace xopt_pool

using namespace xopt_pool;

int xopt_pool_set(int on, uint64_t most_bytes) {
  const ErrnoScope scope;
  const Lock lock;
  if (on != 0) {
    if (!extents.reserve()) return -1;
    reserved.store(true, std::memory_order_release);
  }
  max_bytes = most_bytes;
  extents.trim(max_bytes);
  enabled.store(on != 0, std::memory_order_relaxed);
  return 0;
}

void xopt_pool_get(int* on, uint64_t* most_bytes) {
  const Lock lock;
  *on = is_on() ? 1 : 0;
  *most_bytes = max_bytes;
}

uint64_t xopt_pool_trim(uint64_t keep_bytes) {
  const ErrnoScope scope;
  const Lock lock;
  const uint64_t live = extents.live_bytes();
  return extents.trim(keep_bytes < UINT64_MAX - live ? live + keep_bytes : UINT64_MAX);
}

void xopt_pool_statistics(XoptPoolStatistics* statistics) {
  const Lock lock;
  const uint64_t live = extents.live_bytes();
  *statistics = {live, extents.held_bytes() - live, peak, hits, misses, refused};
}

void xopt_pool_reset_counters() {
  const Lock lock;
  peak = extents.live_bytes();
  hits = misses = refused = 0;
}
