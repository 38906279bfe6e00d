// Extents with boundary tags, found by best fit in bins of like length. Of equal ones the one freed last is taken: what
// is left of it in the caches is of use.
#include "pool/extents.h"

#include <sys/mman.h>
#include <unistd.h>

namespace xopt_pool {
namespace {

constexpr size_t kLeast = size_t{64} << 20;
constexpr size_t kUsual = size_t{256} << 30;
constexpr uint32_t kGranulesPerPage = kPage / kGranule;

constexpr size_t round_to(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void* map(size_t bytes, int protection) {
  void* mapped = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

}  // namespace

bool Extents::reserve() {
  if (base_ != nullptr) return true;
  // Twice the memory there is, so that what is scattered still finds room; and no less than kUsual, since a virtual
  // machine may be given more memory while it runs.
  const size_t twice = 2 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t wanted = twice > kUsual ? round_to(twice, kPage) : kUsual;
  for (; wanted >= kLeast; wanted = round_to(wanted / 2, kPage)) {
    char* mapped = static_cast<char*>(map(wanted + kPage, PROT_NONE));
    if (mapped == nullptr) continue;
    void* tags = map(wanted / kGranule * sizeof(Tag), PROT_READ | PROT_WRITE);
    void* committed = map(wanted / kPage * sizeof(bool), PROT_READ | PROT_WRITE);
    if (tags == nullptr || committed == nullptr) {
      munmap(mapped, wanted + kPage);
      if (tags != nullptr) munmap(tags, wanted / kGranule * sizeof(Tag));
      continue;
    }
    char* aligned = reinterpret_cast<char*>(round_to(reinterpret_cast<uintptr_t>(mapped), kPage));
    madvise(aligned, wanted, MADV_HUGEPAGE);
    tags_ = static_cast<Tag*>(tags);
    committed_ = static_cast<bool*>(committed);
    bytes_ = wanted;
    base_ = aligned;
    return true;
  }
  return false;
}

// ---- Free extents -----------------------------------------------------------------------------------------------

// Four bins for each power of two.
int Extents::bin_of(uint32_t length) {
  const int log = 31 - __builtin_clz(length);
  const int quarter = log >= 2 ? static_cast<int>(length >> (log - 2)) & 3 : 0;
  return 4 * log + quarter;
}

void Extents::mark(uint32_t first, uint32_t length, bool free) {
  tags_[first].length = length;
  tags_[first].free = free;
  tags_[first + length - 1].back = length;
}

void Extents::link(uint32_t first) {
  uint32_t& head = bins_[bin_of(tags_[first].length)];
  tags_[first].previous = kNone;
  tags_[first].next = head == 0 ? kNone : head - 1;
  if (head != 0) tags_[head - 1].previous = first;
  head = first + 1;
}

void Extents::unlink(uint32_t first) {
  const Tag& tag = tags_[first];
  if (tag.previous == kNone) {
    bins_[bin_of(tag.length)] = tag.next == kNone ? 0 : tag.next + 1;
  } else {
    tags_[tag.previous].next = tag.next;
  }
  if (tag.next != kNone) tags_[tag.next].previous = tag.previous;
}

// The smallest that fits of its own bin, else any of the next bin that has one; kNone where nothing fits.
uint32_t Extents::find(uint32_t length) const {
  int bin = bin_of(length);
  uint32_t best = kNone;
  for (uint32_t at = bins_[bin] == 0 ? kNone : bins_[bin] - 1; at != kNone; at = tags_[at].next) {
    const uint32_t has = tags_[at].length;
    if (has >= length && (best == kNone || has < tags_[best].length)) best = at;
    if (has == length) break;
  }
  while (best == kNone && ++bin < kBins) {
    if (bins_[bin] != 0) best = bins_[bin] - 1;
  }
  return best;
}

// Makes extents cover more of the address space, such that one of `length` is free at the end.
bool Extents::grow(uint32_t length) {
  uint32_t last = 0;  // length of the free extent at the end
  if (top_ > 0) {
    const uint32_t first = top_ - tags_[top_ - 1].back;
    if (tags_[first].free) last = tags_[first].length;
  }
  const size_t more = round_to(size_t{length - last} * kGranule, kPage);
  const size_t covered = size_t{top_} * kGranule;
  if (more > bytes_ - covered || mprotect(base_ + covered, more, PROT_READ | PROT_WRITE) != 0) return false;
  const uint32_t first = top_;
  top_ += static_cast<uint32_t>(more / kGranule);
  mark(first, top_ - first, false);
  put_back(first);
  return true;
}

// An extent in use becomes free, and one with its free neighbours.
void Extents::put_back(uint32_t first) {
  uint32_t length = tags_[first].length;
  const uint32_t behind = first + length;
  if (behind < top_ && tags_[behind].free) {
    unlink(behind);
    length += tags_[behind].length;
  }
  if (first > 0) {
    const uint32_t before = first - tags_[first - 1].back;
    if (tags_[before].free) {
      unlink(before);
      tags_[first].length = 0;  // no block begins here any more
      length += tags_[before].length;
      first = before;
    }
  }
  mark(first, length, true);
  link(first);
}

// ---- Pages ------------------------------------------------------------------------------------------------------

uint64_t Extents::uncommitted(uint32_t first, uint32_t length) const {
  uint64_t bytes = 0;
  const uint32_t last = (first + length - 1) / kGranulesPerPage;
  for (uint32_t page = first / kGranulesPerPage; page <= last; ++page) bytes += committed_[page] ? 0 : kPage;
  return bytes;
}

void Extents::commit(uint32_t first, uint32_t length) {
  const uint32_t last = (first + length - 1) / kGranulesPerPage;
  for (uint32_t page = first / kGranulesPerPage; page <= last; ++page) committed_[page] = true;
}

uint64_t Extents::trim_extent(uint32_t first, uint64_t keep) {
  const uint32_t begin = (first + kGranulesPerPage - 1) / kGranulesPerPage;
  uint32_t page = (first + tags_[first].length) / kGranulesPerPage;
  uint64_t given = 0;
  while (page > begin && held_ > keep) {
    --page;
    if (!committed_[page]) continue;
    if (madvise(base_ + size_t{page} * kPage, kPage, MADV_DONTNEED) != 0) continue;
    committed_[page] = false;
    held_ -= kPage;
    given += kPage;
  }
  return given;
}

uint64_t Extents::trim(uint64_t keep) {
  uint64_t given = 0;
  for (uint32_t end = top_; end > 0 && held_ > keep;) {
    const uint32_t first = end - tags_[end - 1].back;
    if (tags_[first].free) given += trim_extent(first, keep);
    end = first;
  }
  return given;
}

// ---- Blocks -----------------------------------------------------------------------------------------------------

void* Extents::take(size_t bytes, uint64_t limit, bool* fresh) {
  if (base_ == nullptr || bytes > bytes_ || bytes > limit) return nullptr;
  const uint32_t length = static_cast<uint32_t>((bytes + kGranule - 1) / kGranule);
  uint32_t first = find(length);
  if (first == kNone) {
    if (!grow(length)) return nullptr;
    first = find(length);
  }
  unlink(first);
  const uint32_t rest = tags_[first].length - length;
  mark(first, length, false);
  if (rest > 0) {
    mark(first + length, rest, true);
    link(first + length);
  }
  const uint64_t more = uncommitted(first, length);
  if (more > limit || held_ > limit - more) trim(more > limit ? 0 : limit - more);
  if (more > limit || held_ > limit - more) {
    put_back(first);
    return nullptr;
  }
  commit(first, length);
  held_ += more;
  live_ += uint64_t{length} * kGranule;
  *fresh = more > 0;
  return base_ + size_t{first} * kGranule;
}

size_t Extents::size_of(const void* block) const {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(block) - base_);
  const size_t first = offset / kGranule;
  if (offset % kGranule != 0 || first >= top_ || tags_[first].free) return 0;
  return size_t{tags_[first].length} * kGranule;
}

bool Extents::release(void* block) {
  const size_t bytes = size_of(block);
  if (bytes == 0) return false;
  live_ -= bytes;
  put_back(static_cast<uint32_t>(static_cast<size_t>(static_cast<char*>(block) - base_) / kGranule));
  return true;
}

}  // namespace xopt_pool
