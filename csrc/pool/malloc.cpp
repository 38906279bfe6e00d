// The allocation functions that the process sees in place of glibc's: large blocks from the pool, all else from glibc
// under the names by which it offers its functions to libraries like this one.
//
// calloc is left alone: glibc knows which of its memory is still zero.
#include <dlfcn.h>
#include <malloc.h>
#include <stdint.h>
#include <string.h>

#include <cerrno>

#include "pool/blocks.h"
#include "pool/extents.h"

// NOLINTBEGIN(bugprone-reserved-identifier): they are glibc's names
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* block);
}
// NOLINTEND(bugprone-reserved-identifier)

namespace {

using xopt_pool::kGranule;
using xopt_pool::kSmallest;

[[gnu::constructor]] void set_glibc_up() {
  // glibc raises its own thresholds with each large block that it frees; it no longer sees any, and would give the top
  // of its heap back again and again. These are the values at which a process with large blocks arrives by itself.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

void* pooled(size_t bytes, size_t alignment) {
  const bool suits = bytes >= kSmallest && alignment <= kGranule && xopt_pool::is_on();
  return suits ? xopt_pool::take(bytes) : nullptr;
}

void* aligned(size_t alignment, size_t bytes) {
  void* block = pooled(bytes, alignment);
  return block != nullptr ? block : __libc_memalign(alignment, bytes);
}

// A block of the pool in another size: where it is, unless it would then be too small or far too large.
void* resized(void* block, size_t bytes) {
  const size_t has = xopt_pool::size_of(block);
  if (bytes <= has && bytes >= has / 2) return block;
  void* moved = malloc(bytes);
  if (moved == nullptr) return nullptr;
  memcpy(moved, block, bytes < has ? bytes : has);
  xopt_pool::release(block);
  return moved;
}

constexpr bool is_power_of_two(size_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

#define XOPT_EXPORT extern "C" [[gnu::visibility("default")]]

XOPT_EXPORT void* malloc(size_t bytes) noexcept {
  void* block = pooled(bytes, 1);
  return block != nullptr ? block : __libc_malloc(bytes);
}

XOPT_EXPORT void free(void* block) noexcept {
  if (xopt_pool::owns(block)) {
    xopt_pool::release(block);
  } else {
    __libc_free(block);
  }
}

XOPT_EXPORT void* realloc(void* block, size_t bytes) noexcept {
  if (!xopt_pool::owns(block)) return __libc_realloc(block, bytes);
  if (bytes > 0) return resized(block, bytes);
  xopt_pool::release(block);
  return nullptr;
}

XOPT_EXPORT int posix_memalign(void** result, size_t alignment, size_t bytes) noexcept {
  if (alignment % sizeof(void*) != 0 || !is_power_of_two(alignment)) return EINVAL;
  const int before = errno;
  void* block = aligned(alignment, bytes);
  errno = before;
  if (block == nullptr) return ENOMEM;
  *result = block;
  return 0;
}

XOPT_EXPORT void* aligned_alloc(size_t alignment, size_t bytes) noexcept { return aligned(alignment, bytes); }

XOPT_EXPORT void* memalign(size_t alignment, size_t bytes) noexcept { return aligned(alignment, bytes); }

XOPT_EXPORT size_t malloc_usable_size(void* block) noexcept {
  if (xopt_pool::owns(block)) return xopt_pool::size_of(block);
  using UsableSize = size_t (*)(void*);
  static UsableSize next = nullptr;
  if (next == nullptr) next = reinterpret_cast<UsableSize>(dlsym(RTLD_NEXT, "malloc_usable_size"));
  return next(block);
}
