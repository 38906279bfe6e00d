// Pixels of an image, side by side with their channels, in what a block multiplies.
#pragma once

#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// `count` pixels of a line, wherever in memory their channels are.
template <class Block>
void copy_pixels(const PatchesView& image, const uint8_t* from, int64_t count, typename Block::A* to) {
  const int64_t size = dtype_size(image.dtype), channels = image.channels, step = image.in_stride[2];
  if (image.channel_stride == 1) {
    const bool dense = step == channels;
    const int64_t runs = dense ? 1 : count, run = dense ? count * channels : channels;
    for (int64_t i = 0; i < runs; ++i) copy_run<Block>(image.dtype, from + i * step * size, run, to + i * run);
    return;
  }
  constexpr int64_t kPiece = 256;  // of one channel, which stays in L1 while it is dealt out
  typename Block::A piece[kPiece];
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t pixels = minimum(kPiece, count - begin), runs = step == 1 ? 1 : pixels;
    for (int64_t channel = 0; channel < channels; ++channel) {
      const uint8_t* plane = from + (begin * step + channel * image.channel_stride) * size;
      for (int64_t i = 0; i < runs; ++i)
        copy_run<Block>(image.dtype, plane + i * step * size, pixels / runs, piece + i);
      for (int64_t i = 0; i < pixels; ++i) to[(begin + i) * channels + channel] = piece[i];
    }
  }
}

}  // namespace xopt::XOPT_ISA
