// Per-thread scratch arenas and the shared memory of packed weights.
//
// Scratch: a thread holds a row of chunks and fills them like a stack. What lies behind the top is free, so a chunk
// behind it that is too small for a request is replaced by a larger one, and the row settles after the first call.
//
// Weights: chunks of virtual memory, filled from the front. Memory is spent only where a weight is written, and a
// 2 MB page is given back as soon as the last weight on it is freed, so neither a half-filled chunk nor one long-lived
// small weight among freed large ones holds more than the pages it stands on. A new weight goes into the gap between
// others that fits best: at its ends lie pages that are held anyway. Weights that are packed together anew leave gaps
// of the size that the next such group needs.
#include "runtime/arena.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define XOPT_PLAIN_MALLOC 1
#else
#define XOPT_PLAIN_MALLOC 0
#endif

namespace xopt {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kAlignment = 64;
constexpr size_t kWeightChunk = size_t{256} << 20;  // of addresses; the page that each chunk ends on is half empty
constexpr size_t kLargest = SIZE_MAX / 4;           // above it, rounding up could overflow

constexpr size_t round_to(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// 2 MB-aligned memory of a whole number of 2 MB pages; nullptr where the system has none.
char* map_pages(size_t bytes) {
  const size_t padded = bytes + kPage;
  void* mapped = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* raw = static_cast<char*>(mapped);
  char* base = reinterpret_cast<char*>(round_to(reinterpret_cast<uintptr_t>(raw), kPage));
  const size_t before = static_cast<size_t>(base - raw);
  if (before > 0) munmap(raw, before);
  munmap(base + bytes, padded - before - bytes);
  madvise(base, bytes, MADV_HUGEPAGE);
  return base;
}

// An address of its own for every piece, even an empty one; nullptr where memory is spent.
void* plain_malloc(size_t bytes) {
  void* data = nullptr;
  return posix_memalign(&data, kAlignment, bytes > 0 ? bytes : 1) == 0 ? data : nullptr;
}

// ---- Scratch ----------------------------------------------------------------------------------------------------

std::atomic<int64_t> arena_limit{-1};
std::atomic<int64_t> arena_held{0};

class Arena {
 public:
  ~Arena() { drop_from(0); }

  struct Mark {
    size_t chunk, top;
  };
  Mark mark() const { return {chunk_, top_}; }

  // nullptr where memory or the limit is spent; then the pieces in use stand as before.
  void* take(size_t bytes) {
    const int64_t limit = arena_limit.load(std::memory_order_relaxed);
    if (limit >= 0 && in_use_ + bytes > static_cast<size_t>(limit)) return nullptr;
    void* data = XOPT_PLAIN_MALLOC ? take_alone(bytes) : take_on_top(bytes);
    if (data != nullptr) in_use_ += bytes;
    return data;
  }

  void give_back(void* data, size_t bytes, Mark mark) {
    in_use_ -= bytes;
    if (XOPT_PLAIN_MALLOC) {
      free(data);
      arena_held.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    }
    chunk_ = mark.chunk;
    top_ = mark.top;
  }

 private:
  struct Chunk {
    char* base;
    size_t bytes;
  };

  void* take_alone(size_t bytes) {
    void* data = plain_malloc(bytes);
    if (data != nullptr) arena_held.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    return data;
  }

  void* take_on_top(size_t bytes) {
    const bool fits = !chunks_.empty() && chunks_[chunk_].bytes - top_ >= bytes;
    if (!fits && !next_chunk(bytes)) return nullptr;
    void* data = chunks_[chunk_].base + top_;
    top_ += bytes;
    return data;
  }

  bool next_chunk(size_t bytes) {
    const size_t next = top_ == 0 ? chunk_ : chunk_ + 1;
    if (next >= chunks_.size() || chunks_[next].bytes < bytes) {
      drop_from(next);
      const size_t size = round_to(bytes, kPage);
      chunks_.reserve(next + 1);
      char* base = map_pages(size);
      if (base == nullptr) return false;
      chunks_.push_back({base, size});
      arena_held.fetch_add(static_cast<int64_t>(size), std::memory_order_relaxed);
    }
    chunk_ = next;
    top_ = 0;
    return true;
  }

  void drop_from(size_t first) {
    while (chunks_.size() > first) {
      munmap(chunks_.back().base, chunks_.back().bytes);
      arena_held.fetch_sub(static_cast<int64_t>(chunks_.back().bytes), std::memory_order_relaxed);
      chunks_.pop_back();
    }
  }

  std::vector<Chunk> chunks_;
  size_t chunk_ = 0;  // the chunk being filled; all behind it are free
  size_t top_ = 0;    // bytes used of it
  size_t in_use_ = 0;
};

Arena& thread_arena() {
  thread_local Arena arena;
  return arena;
}

// ---- Packed weights ---------------------------------------------------------------------------------------------

// Free memory that is large enough.
struct WeightPlace {
  char* data = nullptr;
  size_t bytes = 0;
  bool last = false;  // behind all weights of its chunk, where no page may be held yet

  bool better_than(const WeightPlace& other) const {
    if (data == nullptr || other.data == nullptr) return data != nullptr;
    return last != other.last ? other.last : bytes < other.bytes;
  }
};

// Part of a 2 MB page can be given back by itself, at the price of small pages for its neighbours.
constexpr size_t kSmallPage = size_t{4} << 10;
constexpr size_t kWorthSplitting = size_t{256} << 10;

class WeightChunk {
 public:
  WeightChunk(char* base, size_t bytes) : base_(base), bytes_(bytes), weights_on_(bytes / kPage, 0) {}

  bool empty() const { return sizes_.empty(); }
  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

  WeightPlace best_place(size_t bytes) const {
    WeightPlace best;
    char* place = base_;
    const auto offer = [&](size_t free, bool last) {
      const WeightPlace found{place, free, last};
      if (free >= bytes && found.better_than(best)) best = found;
    };
    for (const auto& [data, size] : sizes_) {
      offer(static_cast<size_t>(data - place), false);
      place = data + size;
    }
    offer(static_cast<size_t>(base_ + bytes_ - place), true);
    return best;
  }

  // `pages` counts the pages that weights lie on.
  void* take(char* data, size_t bytes, int64_t* pages) {
    sizes_.emplace(data, bytes);
    const size_t first = static_cast<size_t>(data - base_);
    for (size_t page = first / kPage; page <= (first + bytes - 1) / kPage; ++page) *pages += weights_on_[page]++ == 0;
    return data;
  }

  bool release(void* data, int64_t* pages) {
    const auto found = sizes_.find(static_cast<char*>(data));
    if (found == sizes_.end()) return false;
    const size_t first = static_cast<size_t>(found->first - base_), end = first + found->second;
    for (size_t page = first / kPage; page <= (end - 1) / kPage; ++page) *pages -= --weights_on_[page] == 0;
    give_back(first, end, sizes_.erase(found));
    return true;
  }

 private:
  // What a weight before `next` has left behind, with what is free beside it and was too little so far. Merged layers
  // leave gaps in the middle of models, which no later weight fits into.
  void give_back(size_t begin, size_t end, std::map<char*, size_t>::const_iterator next) {
    begin = begin < kWorthSplitting ? 0 : begin - kWorthSplitting;
    end = std::min(end + kWorthSplitting, bytes_);
    if (next != sizes_.end()) end = std::min(end, static_cast<size_t>(next->first - base_));
    if (next != sizes_.begin()) {
      const auto before = std::prev(next);
      begin = std::max(begin, static_cast<size_t>(before->first - base_) + before->second);
    }
    begin = round_to(begin, kSmallPage);
    end = end / kSmallPage * kSmallPage;
    if (end < begin + kWorthSplitting) return;
    madvise(base_ + begin, end - begin, MADV_DONTNEED);
  }

  char* base_;
  size_t bytes_;
  std::vector<uint32_t> weights_on_;  // of each page
  std::map<char*, size_t> sizes_;
};

class WeightMemory {
 public:
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    WeightPlace best;
    WeightChunk* chunk = nullptr;
    for (auto& entry : chunks_) {
      const WeightPlace place = entry.second.best_place(bytes);
      if (!place.better_than(best)) continue;
      best = place;
      chunk = &entry.second;
    }
    if (chunk != nullptr) return chunk->take(best.data, bytes, &pages_);
    const size_t size = bytes > kWeightChunk ? round_to(bytes, kPage) : kWeightChunk;
    char* base = map_pages(size);
    if (base == nullptr) throw std::bad_alloc();
    return chunks_.emplace(base, WeightChunk(base, size)).first->second.take(base, bytes, &pages_);
  }

  void release(void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = chunks_.upper_bound(static_cast<char*>(data));
    if (after == chunks_.begin()) throw std::invalid_argument("weight_free: not from weight_alloc");
    const auto chunk = --after;
    if (!chunk->second.release(data, &pages_)) throw std::invalid_argument("weight_free: not from weight_alloc");
    if (!chunk->second.empty()) return;
    munmap(chunk->second.base(), chunk->second.bytes());
    chunks_.erase(chunk);
  }

  int64_t held() {
    const std::lock_guard<std::mutex> lock(mutex);
    return pages_ * static_cast<int64_t>(kPage);
  }

  // Held over a fork, so that no other thread leaves it locked in the child.
  std::mutex mutex;

 private:
  std::map<char*, WeightChunk> chunks_;
  int64_t pages_ = 0;
};

// Never destroyed: weights may be freed by Python objects that outlive this library's static objects.
WeightMemory& weight_memory() {
  static WeightMemory& memory = *[] {
    pthread_atfork([] { weight_memory().mutex.lock(); }, [] { weight_memory().mutex.unlock(); },
                   [] { weight_memory().mutex.unlock(); });
    return new WeightMemory;
  }();
  return memory;
}

std::atomic<int64_t> plain_weight_bytes{0};

// In front of a plainly allocated weight: its size, for the count.
constexpr size_t kPlainHeader = kAlignment;

}  // namespace

ScratchError::ScratchError(size_t bytes) noexcept {
  std::snprintf(message_, sizeof(message_), "xopt: no scratch memory for %zu bytes", bytes);
}

Scratch::Scratch(size_t bytes) : data_(nullptr), bytes_(0), previous_chunk_(0), previous_top_(0) {
  if (bytes > kLargest) throw ScratchError(bytes);
  Arena& arena = thread_arena();
  const Arena::Mark mark = arena.mark();
  // Under AddressSanitizer the last byte matters, so there the piece is not rounded up.
  bytes_ = XOPT_PLAIN_MALLOC ? bytes : round_to(bytes > 0 ? bytes : 1, kAlignment);
  previous_chunk_ = mark.chunk;
  previous_top_ = mark.top;
  data_ = arena.take(bytes_);
  if (data_ == nullptr) throw ScratchError(bytes);
}

Scratch::~Scratch() { thread_arena().give_back(data_, bytes_, {previous_chunk_, previous_top_}); }

void set_arena_limit(int64_t bytes) { arena_limit.store(bytes, std::memory_order_relaxed); }

int64_t arena_bytes() { return arena_held.load(std::memory_order_relaxed); }

void* weight_alloc(size_t bytes) {
  if (bytes > kLargest) throw std::bad_alloc();
  if (XOPT_PLAIN_MALLOC) {
    void* raw = plain_malloc(kPlainHeader + bytes);
    if (raw == nullptr) throw std::bad_alloc();
    *static_cast<size_t*>(raw) = bytes;
    plain_weight_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    return static_cast<char*>(raw) + kPlainHeader;
  }
  return weight_memory().take(round_to(bytes > 0 ? bytes : 1, kAlignment));
}

void weight_free(void* data) {
  if (data == nullptr) return;
  if (XOPT_PLAIN_MALLOC) {
    void* raw = static_cast<char*>(data) - kPlainHeader;
    plain_weight_bytes.fetch_sub(static_cast<int64_t>(*static_cast<size_t*>(raw)), std::memory_order_relaxed);
    free(raw);
    return;
  }
  weight_memory().release(data);
}

int64_t weight_bytes() {
  return XOPT_PLAIN_MALLOC ? plain_weight_bytes.load(std::memory_order_relaxed) : weight_memory().held();
}

}  // namespace xopt
