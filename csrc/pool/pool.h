// The C interface of libxopt_pool.so, which stands in front of malloc when it is loaded by LD_PRELOAD: large blocks come
// from memory on 2 MB pages that is kept and used again, all else goes to glibc as ever.
//
// Preloaded, it is on, without a limit. Whoever wants to talk to it looks these names up in the running process.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

struct XoptPoolStatistics {
  uint64_t live_bytes;    // of blocks in use
  uint64_t cached_bytes;  // held beyond that, for the next blocks
  uint64_t peak_bytes;    // the most that live_bytes was since the counters were set back
  uint64_t hits;          // blocks made wholly of memory that was held
  uint64_t misses;        // blocks for which the system had to give memory
  uint64_t refused;       // large blocks left to glibc, for the limit or for lack of address space
};

// Whether large blocks come from the pool, and how much memory it may hold at most, in use or not. A block for which
// that is not enough comes from glibc. Blocks in use stay where they are whatever is set. 0, or -1 where the pool has no
// address space to work in.
int xopt_pool_set(int enabled, uint64_t max_bytes);
void xopt_pool_get(int* enabled, uint64_t* max_bytes);

// Gives memory that is not in use back to the system, but for `keep_bytes`, as far as whole pages are free: what was
// given back.
uint64_t xopt_pool_trim(uint64_t keep_bytes);

void xopt_pool_statistics(XoptPoolStatistics* statistics);
// hits, misses and refused to 0, peak_bytes to live_bytes.
void xopt_pool_reset_counters(void);
}
#pragma GCC visibility pop
