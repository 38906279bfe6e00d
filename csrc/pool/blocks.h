// What the allocation functions ask of the pool. Thread-safe.
#pragma once

#include <stddef.h>

namespace xopt_pool {

// Smaller blocks, and such as want a larger alignment, are glibc's. glibc's own malloc would map blocks from this size on
// by themselves, too, until it has learned better.
inline constexpr size_t kSmallest = size_t{128} << 10;

bool is_on();
// Whether the address lies where the pool's blocks lie.
bool owns(const void* address);
// nullptr where the limit or the system does not allow it.
void* take(size_t bytes);
// False where no block begins there.
bool release(void* block);
size_t size_of(const void* block);

}  // namespace xopt_pool
