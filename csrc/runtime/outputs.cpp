// See outputs.h. The extents are those of libxopt_pool.so, a second set of them.
#include "runtime/outputs.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

#include "pool/extents.h"

namespace xopt {
namespace {

// An AddressSanitizer build shall see an overrun.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kPools = false;
#else
constexpr bool kPools = true;
#endif

// glibc keeps smaller blocks by itself once it has seen a few.
constexpr size_t kSmallest = size_t{1} << 20;

struct Outputs {
  std::mutex mutex;
  xopt_pool::Extents extents;
  bool tried = false, usable = false;
  uint64_t allocations = 0, fresh_blocks = 0;
};

// Never destroyed: tensors may be freed after static destructors have run.
Outputs& outputs() {
  static Outputs& all = *new Outputs;
  return all;
}

std::atomic<uint64_t> kept{uint64_t{256} << 20};

[[gnu::constructor]] void survive_forks() {
  pthread_atfork([] { outputs().mutex.lock(); }, [] { outputs().mutex.unlock(); }, [] { outputs().mutex.unlock(); });
}

bool prepare(Outputs* all) {
  if (!all->tried) {
    all->tried = true;
    all->usable = dlsym(RTLD_DEFAULT, "xopt_pool_set") == nullptr && all->extents.reserve();
  }
  return all->usable;
}

// Nothing where no more is held.
void trim(Outputs* all) { all->extents.trim(all->extents.live_bytes() + kept.load(std::memory_order_relaxed)); }

}  // namespace

void* output_alloc(size_t bytes) {
  if (!kPools || bytes < kSmallest || kept.load(std::memory_order_relaxed) == 0) return nullptr;
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  if (!prepare(&all)) return nullptr;
  bool fresh = false;
  void* data = all.extents.take(bytes, UINT64_MAX, &fresh);
  if (data == nullptr) return nullptr;
  ++all.allocations;
  if (fresh) ++all.fresh_blocks;
  return data;
}

void output_free(void* data) {
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  all.extents.release(data);
  trim(&all);
}

void set_kept_output_bytes(uint64_t bytes) {
  kept.store(bytes, std::memory_order_relaxed);
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  if (all.usable) trim(&all);
}

OutputStatistics output_statistics() {
  Outputs& all = outputs();
  const std::lock_guard lock(all.mutex);
  const uint64_t live = all.extents.live_bytes();
  return {live, all.extents.held_bytes() - live, all.allocations, all.fresh_blocks};
}

}  // namespace xopt
