// The memory behind the pool: one stretch of address space, divided into extents that are in use or free.
//
// The stretch is reserved once and never given back, so that one comparison tells whether an address is the pool's, and
// so that blocks stay valid whatever becomes of the pool. Memory is spent where pages are touched, and is given back page
// by page. An extent is a whole number of 16 KB granules; free neighbours are always one extent. Lengths stand at both
// ends of an extent in a table beside the memory (boundary tags), so that freeing finds its neighbours at once.
//
// Not thread-safe: pool.cpp locks. It never calls malloc, and uses nothing of the C++ library.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace xopt_pool {

inline constexpr size_t kGranule = size_t{16} << 10;
inline constexpr size_t kPage = size_t{2} << 20;

class Extents {
 public:
  // Reserves address space, less where there is less; false where there is none worth the while.
  bool reserve();

  bool owns(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_) < bytes_;
  }

  // A block of at least `bytes`, aligned to a granule; nullptr where held_bytes() would exceed `limit` or the system has
  // no more. `fresh` tells whether the system had to give memory for it.
  void* take(size_t bytes, uint64_t limit, bool* fresh);
  // False where the address is not that of a block in use.
  bool release(void* block);
  // Bytes of the block in use at this address; 0 where there is none.
  size_t size_of(const void* block) const;

  // Gives whole free pages back, the highest first, until at most `keep` bytes are held.
  uint64_t trim(uint64_t keep);

  uint64_t live_bytes() const { return live_; }
  uint64_t held_bytes() const { return held_; }

 private:
  // One for each granule. An extent's first granule holds its length and, where it is free, its place in a list; its
  // last granule holds its length as `back`.
  struct Tag {
    uint32_t length;
    uint32_t back;
    uint32_t next, previous;  // free extents of like length; kNone at the ends
    bool free;
  };
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr int kBins = 128;

  static int bin_of(uint32_t length);
  uint32_t find(uint32_t length) const;
  bool grow(uint32_t length);
  void mark(uint32_t first, uint32_t length, bool free);
  void link(uint32_t first);
  void unlink(uint32_t first);
  void put_back(uint32_t first);
  uint64_t uncommitted(uint32_t first, uint32_t length) const;
  void commit(uint32_t first, uint32_t length);
  uint64_t trim_extent(uint32_t first, uint64_t keep);

  char* base_ = nullptr;
  size_t bytes_ = 0;
  Tag* tags_ = nullptr;
  bool* committed_ = nullptr;  // of each 2 MB page
  uint32_t top_ = 0;           // granules that extents cover; all behind was never used
  uint64_t live_ = 0;
  uint64_t held_ = 0;
  uint32_t bins_[kBins] = {};  // first free extent of each, plus one; 0: none
};

}  // namespace xopt_pool
