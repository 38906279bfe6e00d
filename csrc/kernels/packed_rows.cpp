// See packed_rows.h. Plain code, the same on every level.
//
// A row is spread over its panel in units of 4 bytes, one in each 64: the whole panel's half passes through the cache,
// 16 times what the row holds. The hardware's prefetcher follows the constant stride, so that it runs at memory speed;
// against the product that the weight is packed for it is nothing.
#include "kernels/packed_rows.h"

#include <algorithm>
#include <cstring>

#include "runtime/parallel.h"

namespace xopt {
namespace {

constexpr int64_t kUnitBytes = 4;
constexpr int64_t kRowBytes = kTileColumns * kUnitBytes;  // of a tile
constexpr int64_t kRowsPerThread = 8;                     // fewer are not worth a thread

void copy_row(const PackedWeight& weight, int64_t index, uint8_t* out) {
  const int64_t column = index % kPanelColumns;
  const uint8_t* tiles = weight.panel_data + index / kPanelColumns * weight.panel_bytes +
                         column / kTileColumns * kTileBytes + column % kTileColumns * kUnitBytes;
  const int64_t bytes = weight.k * dtype_size(weight.dtype);
  for (int64_t done = 0; done < bytes; tiles += 2 * kTileBytes) {
    const int64_t here = std::min(bytes - done, kTileRows * kUnitBytes);
    const int64_t whole = here / kUnitBytes;
    for (int64_t unit = 0; unit < whole; ++unit) {
      std::memcpy(out + done + unit * kUnitBytes, tiles + unit * kRowBytes, kUnitBytes);
    }
    const auto rest = static_cast<size_t>(here - whole * kUnitBytes);
    if (rest > 0) std::memcpy(out + done + whole * kUnitBytes, tiles + whole * kRowBytes, rest);
    done += here;
  }
}

}  // namespace

void packed_rows(const PackedRowsCall& call) {
  const PackedWeight weight(call.packed);
  const int64_t row_bytes = weight.k * dtype_size(weight.dtype);
  const int64_t wanted = call.count / kRowsPerThread + 1;
  const int threads = static_cast<int>(std::clamp<int64_t>(wanted, 1, max_threads()));
  parallel(threads, [&](int thread, int count) {
    const int64_t end = call.count * (thread + 1) / count;
    for (int64_t i = call.count * thread / count; i < end; ++i) {
      copy_row(weight, call.indices[i], static_cast<uint8_t*>(call.out) + i * row_bytes);
    }
  });
}

}  // namespace xopt
