// Windows of images. See windows.h.
// isa: scalar
//
// A row of a window is a run of pixels of an image's row, or two of them where the roll begins anew. They are copied by
// memcpy, which is written for each CPU. Images are walked by rows, in the windows' order.
#include "kernels/windows.h"

#include <cstring>

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kBytesOfAThread = 65536;  // fewer are not worth waking another thread

void copy_pixels(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int64_t count,
                 int64_t bytes) {
  if (to_stride == bytes && from_stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(count * bytes));
    return;
  }
  for (int64_t i = 0; i < count; ++i, to += to_stride, from += from_stride) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

// A row of all windows that stand side by side.
void copy_row(const WindowsCall& call, int64_t image, int64_t y) {
  const int64_t height = call.count[0] * call.size[0], width = call.count[1] * call.size[1], bytes = call.pixel_bytes;
  const int64_t row = (y + call.first[0]) % height;
  const int64_t row_at = image * call.image_stride + row * call.stride[0];
  const int64_t window_bytes = call.size[0] * call.size[1] * bytes;
  const int64_t windows_at = (image * call.count[0] + y / call.size[0]) * call.count[1] * window_bytes +
                             y % call.size[0] * call.size[1] * bytes;
  const auto* from = static_cast<const uint8_t*>(call.from);
  auto* to = static_cast<uint8_t*>(call.to);
  int64_t length = 0;
  for (int64_t x = 0; x < width; x += length) {
    const int64_t column = (x + call.first[1]) % width, in_window = x % call.size[1];
    const bool inside = row < call.inside[0] && column < call.inside[1];
    length = minimum(call.size[1] - in_window, (inside ? call.inside[1] : width) - column);
    const int64_t image_at = row_at + column * call.stride[1];
    const int64_t window_at = windows_at + x / call.size[1] * window_bytes + in_window * bytes;
    if (inside && call.merges) {
      copy_pixels(to + image_at, call.stride[1], from + window_at, bytes, length, bytes);
    } else if (inside) {
      copy_pixels(to + window_at, bytes, from + image_at, call.stride[1], length, bytes);
    } else if (!call.merges) {
      std::memset(to + window_at, 0, static_cast<size_t>(length * bytes));
    }
  }
}

void windows(const WindowsCall& call) {
  const int64_t height = call.count[0] * call.size[0], rows = call.images * height;
  const int64_t bytes = rows * call.count[1] * call.size[1] * call.pixel_bytes;
  const int64_t threads = minimum(minimum<int64_t>(max_threads(), rows), bytes / kBytesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    const int64_t end = rows * (thread + 1) / count;
    for (int64_t i = rows * thread / count; i < end; ++i) copy_row(call, i / height, i % height);
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(windows, f32, windows);

}  // namespace xopt::XOPT_ISA
