// See xpu_weights.h.
#include "ops/xpu_weights.h"

#include <mutex>
#include <unordered_map>

namespace xopt::ops {
namespace {

struct Kept {
  std::mutex mutex;
  std::unordered_map<const void*, HeaderBytes> headers;  // by where their weights begin
};

// Never destroyed: the last weights may be dropped after the process's static storage.
Kept& kept() {
  static auto* const all = new Kept;
  return *all;
}

void forget(void* data) {
  const std::lock_guard<std::mutex> lock(kept().mutex);
  kept().headers.erase(data);
}

HeaderBytes read_bytes(const void* data) {
  HeaderBytes bytes;
  std::memcpy(bytes.data(), data, bytes.size());
  return bytes;
}

}  // namespace

Tensor moved_to_place(const Tensor& made) {
  Tensor moved = made.placed_copy();
  const bool is_packed = made.dtype_code() == torch_codes().u8 && made.dims() == 1 &&
                         made.size(0) >= static_cast<int64_t>(sizeof(HeaderBytes));
  if (!is_packed) return moved;
  Tensor watched = Tensor::watched(std::move(moved), &forget);
  const std::lock_guard<std::mutex> lock(kept().mutex);
  kept().headers[watched.data()] = read_bytes(made.data());
  return watched;
}

HeaderBytes header_bytes(const Tensor& packed) {
  if (packed.on_cpu()) return read_bytes(packed.data());
  {
    const std::lock_guard<std::mutex> lock(kept().mutex);
    const auto known = kept().headers.find(packed.data());
    if (known != kept().headers.end()) return known->second;
  }
  return read_bytes(packed.first(sizeof(HeaderBytes)).host_copy().data());
}

}  // namespace xopt::ops
