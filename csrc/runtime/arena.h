// Scratch memory of a thread, reused from call to call, and long-lived memory for packed weights on 2 MB pages.
//
// Both are bump allocators over chunks of 2 MB-aligned memory, so that blocks a kernel sweeps cost few TLB entries.
// In an AddressSanitizer build each piece is an allocation of its own, so that an overrun is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace xopt {

class ScratchError : public std::bad_alloc {
 public:
  explicit ScratchError(size_t bytes) noexcept;
  const char* what() const noexcept override { return message_; }

 private:
  char message_[96];
};

// A stretch of the calling thread's arena, given back at the end of the scope in the reverse order of taking.
// 64-byte aligned, uninitialised. Throws ScratchError where memory or the test's limit is spent.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  size_t bytes_;  // taken of the arena: rounded up to the alignment
  size_t previous_chunk_, previous_top_;
};

// For tests: a Scratch that would bring what a thread has in use above `bytes` throws. Negative: no limit.
void set_arena_limit(int64_t bytes);
// Bytes that all arenas hold at present, in use or kept for the next call.
int64_t arena_bytes();

// Memory for packed weights, 64-byte aligned, carved out of 2 MB pages (madvise) that several weights share.
// A page goes back to the system when no weight lies on it any more. Throws std::bad_alloc.
void* weight_alloc(size_t bytes);
// Frees what weight_alloc gave; nullptr is fine, anything else throws std::invalid_argument.
void weight_free(void* data);
// Bytes of the 2 MB pages that weights lie on at present.
int64_t weight_bytes();

}  // namespace xopt
