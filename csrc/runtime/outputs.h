// Memory of large outputs, kept when their tensors are freed. malloc gives such blocks back to the system, and the next
// forward then pays for each of their pages again: more than half the time of a convolution that writes 25 MB.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xopt {

// Aligned to at least 64 bytes. nullptr where malloc does as well: the block is small, what is kept is 0, the process
// runs on a malloc that pools (libxopt_pool.so), or there is no address space.
void* output_alloc(size_t bytes);
void output_free(void* data);

// How much memory may be held at most beyond what is in use. What is above it goes back to the system.
void set_kept_output_bytes(uint64_t bytes);

struct OutputStatistics {
  uint64_t live_bytes;    // of outputs in use
  uint64_t kept_bytes;    // held beyond that
  uint64_t allocations;   // so far
  uint64_t fresh_blocks;  // those for which the system had to give memory
};
OutputStatistics output_statistics();

}  // namespace xopt
