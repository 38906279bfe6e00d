// Pixels of an image, side by side with their channels, in what a block multiplies.
#pragma once

#include "tiles/view.h"

namespace xopt::XOPT_ISA {

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// Where the values of vectors of pixels of three channels come from: a third of them, at `place`, from each channel.
struct OfThree {
  constexpr OfThree() {
    for (int v = 0; v < 3; ++v) {
      for (int i = 0; i < kWidth; ++i) {
        place[v][i] = (v * kWidth + i) / 3;
        lanes[v][(v * kWidth + i) % 3] |= 1U << i;
      }
    }
  }
  int32_t place[3][kWidth] = {};
  uint32_t lanes[3][3] = {};
};

// Three channels, `step` values apart, side by side. Value by value a 224 x 224 image took 40 us.
template <class A>
void deal_out_three(const A* channels, int64_t step, int64_t pixels, A* to) {
  static constexpr OfThree kFrom;
  for (; pixels >= kWidth; pixels -= kWidth, channels += kWidth, to += 3 * kWidth) {
    const F first = load(channels), second = load(channels + step), third = load(channels + 2 * step);
    for (int v = 0; v < 3; ++v) {
      const __m512i place = _mm512_loadu_si512(kFrom.place[v]);
      F values = _mm512_permutexvar_ps(place, first);
      values = _mm512_mask_permutexvar_ps(values, static_cast<__mmask16>(kFrom.lanes[v][1]), place, second);
      values = _mm512_mask_permutexvar_ps(values, static_cast<__mmask16>(kFrom.lanes[v][2]), place, third);
      store(to + v * kWidth, values);
    }
  }
  for (int64_t i = 0; i < pixels; ++i) {
    for (int64_t c = 0; c < 3; ++c) to[3 * i + c] = channels[c * step + i];
  }
}
#endif

// Channels, `step` values apart, side by side.
template <class A>
void deal_out(const A* channels, int64_t step, int64_t count, int64_t pixels, A* to) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  if constexpr (sizeof(A) > 1) {
    if (count == 3) return deal_out_three(channels, step, pixels, to);
  }
#endif
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t i = 0; i < pixels; ++i) to[i * count + c] = channels[c * step + i];
  }
}

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
  constexpr int64_t kPiece = 256;  // of each channel, which stay in L1 while they are dealt out
  typename Block::A piece[kMostChannelsApart * kPiece];
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t pixels = minimum(kPiece, count - begin), runs = step == 1 ? 1 : pixels;
    for (int64_t channel = 0; channel < channels; ++channel) {
      const uint8_t* plane = from + (begin * step + channel * image.channel_stride) * size;
      for (int64_t i = 0; i < runs; ++i) {
        copy_run<Block>(image.dtype, plane + i * step * size, pixels / runs, piece + channel * kPiece + i);
      }
    }
    deal_out(piece, kPiece, channels, pixels, to + begin * channels);
  }
}

}  // namespace xopt::XOPT_ISA
