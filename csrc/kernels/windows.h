// Windows of images, cut out of them and put back: the contract of the kernel "windows" (dtype f32, as every kernel that
// serves all dtypes; it copies bytes).
//
// Windows cover a padded image that is rolled: their first pixel is that at `first`, and what is beyond the padded
// image's end is at its beginning. Pixels of the padding are zeros in windows, and are not put back.
#pragma once

#include "tiles/types.h"

namespace xopt {

struct WindowsCall {
  bool merges;       // windows become images; otherwise images become windows
  const void* from;  // windows are contiguous: [images, count, size, pixel]
  void* to;
  int64_t images;
  int64_t count[2], size[2];  // of windows down and across, and of pixels in one
  int64_t inside[2];          // pixels of an image, without the padding after them
  int64_t first[2];           // in the padded image
  int64_t image_stride;       // bytes
  int64_t stride[2];          // bytes from a row to the next, and from a pixel
  int64_t pixel_bytes;        // contiguous
};

using WindowsFn = void(const WindowsCall& call);

}  // namespace xopt
