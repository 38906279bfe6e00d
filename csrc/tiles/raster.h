// The view of a convolution whose tiles are read out of the image itself, with no copy of patches.
//
// An output position and the one beside it read input that is one pixel apart (stride 1), whatever the place in the
// kernel. So the rows of A for one place of the kernel and 32 channels are a run of pixels, and a tile load takes them as
// they lie: pixels are the tile's rows. What makes the run is a copy of the image with its zeros around it, the raster,
// which stays in L2. It is as wide as the outputs of a line need; rows of A go on over the end of a line, through a few
// positions that are no outputs (2 of 58 under a 3 x 3 kernel on 56 pixels), whose sums nobody reads.
// Under a stride the image is dealt out into planes, each with the pixels that one place of the kernel meets, so that a
// run is one again.
//
// Where L2 would hold few lines of an image, its channels come in groups, each with a raster of its own.
//
// Of few channels, a position of the raster is what a whole line of the kernel meets there (kernels/conv_lines.h).
#pragma once

#include "runtime/arena.h"
#include "tiles/pixels.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

class Raster {
 public:
  struct Channels {
    int64_t begin, count;
  };

  // `whole_lines`: of the kernel, side by side in a position. The kernel of `view` then has a width of 1. Else positions
  // hold up to `most_channels`.
  Raster(const PatchesView& input, bool whole_lines, int64_t most_channels)
      : image_(input),
        view_(whole_lines ? line_view(input) : input),
        whole_lines_(whole_lines),
        most_channels_(whole_lines ? view_.channels : minimum(most_channels, view_.channels)),
        element_(dtype_size(input.dtype) == 1 ? 1 : 2) {
    const PatchesView& view = view_;
    for (int d = 0; d < 3; ++d) {
      period_[d] = view.stride[d] / greatest_divisor(view.stride[d], view.dilation[d]);
      planes_[d] = minimum(view.kernel[d], period_[d]);
      const int64_t reach = (view.kernel[d] - 1) * view.dilation[d] / view.stride[d];
      extent_[d] = view.out[d] + reach;
      reach_ = reach_ * (view.out[d] + reach) + reach;
      span_ = (d == 0 ? 0 : span_ * extent_[d]) + view.out[d] - 1;
    }
    ++span_;
    // Long pixels that are a multiple of many lines would all fall into few sets of L1.
    const int64_t lines = maximum<int64_t>(1, ceil_div(most_channels_ * element_, 64));
    pitch_ = 64 * (lines >= 8 ? lines | 1 : lines);
  }

  // Positions from an image's first output to its last, those between that are no outputs included.
  int64_t span() const { return span_; }
  // How many positions further on its last input is.
  int64_t reach() const { return reach_; }
  // Bytes of a position in all planes.
  int64_t position_bytes() const { return planes_[0] * planes_[1] * planes_[2] * pitch_; }
  int64_t pitch() const { return pitch_; }

  int64_t channels() const { return view_.channels; }
  int64_t most_channels() const { return most_channels_; }  // of a position
  // Of the kernel.
  int64_t places() const { return view_.kernel[0] * view_.kernel[1] * view_.kernel[2]; }

  // Where rows begin for each of them, if planes are so far apart.
  void set_places(int64_t plane_bytes, int64_t* to) const {
    const PatchesView& v = view_;
    for (int64_t z = 0; z < v.kernel[0]; ++z) {
      for (int64_t y = 0; y < v.kernel[1]; ++y) {
        for (int64_t x = 0; x < v.kernel[2]; ++x) {
          const int64_t plane = (z % period_[0] * planes_[1] + y % period_[1]) * planes_[2] + x % period_[2];
          const int64_t position = (shift(0, z) * extent_[1] + shift(1, y)) * extent_[2] + shift(2, x);
          *to++ = plane * plane_bytes + position * pitch_;
        }
      }
    }
  }

  // These channels of positions [begin, end) of an image into each plane.
  template <class Block>
  void copy(Channels channels, int64_t image, int64_t begin, int64_t end, int64_t plane_bytes, uint8_t* to) const {
    for (int64_t z = 0; z < planes_[0]; ++z) {
      for (int64_t y = 0; y < planes_[1]; ++y) {
        for (int64_t x = 0; x < planes_[2]; ++x, to += plane_bytes) {
          const int64_t first[3] = {first_input(0, z), first_input(1, y), first_input(2, x)};
          copy_plane<Block>(channels, image, begin, end, first, to);
        }
      }
    }
  }

  // The outputs among a run of positions, from one on.
  class Outputs {
   public:
    Outputs() = default;
    Outputs(const Raster& raster, int64_t image, int64_t position) : raster_(&raster) {
      const PatchesView& v = raster.view_;
      for (int d = 2; d >= 0; --d) {
        at_[d] = d == 0 ? position : position % raster.extent_[d];
        position /= raster.extent_[d];
      }
      first_ = image * v.out[0] * v.out[1] * v.out[2];
    }

    // The first output at or after the place, as a row of the product.
    int64_t row() const {
      const PatchesView& v = raster_->view_;
      return first_ + (at_[0] * v.out[1] + minimum(at_[1], v.out[1] - 1)) * v.out[2] + minimum(at_[2], v.out[2] - 1);
    }

    // For rows [begin, end), which follow the rows of the call before: done(row of the product, begin, end) for each run
    // of outputs.
    template <class Done>
    void each(int64_t begin, int64_t end, const Done& done) {
      const PatchesView& v = raster_->view_;
      while (begin < end) {
        const bool inside = at_[2] < v.out[2];
        const int64_t run = minimum((inside ? v.out[2] : raster_->extent_[2]) - at_[2], end - begin);
        if (inside && at_[1] < v.out[1]) done(row(), begin, begin + run);
        begin += run;
        at_[2] += run;
        if (at_[2] < raster_->extent_[2]) continue;
        at_[2] = 0;
        if (++at_[1] < raster_->extent_[1]) continue;
        at_[1] = 0;
        ++at_[0];
      }
    }

   private:
    const Raster* raster_ = nullptr;
    int64_t at_[3] = {0, 0, 0}, first_ = 0;
  };

 private:
  static PatchesView line_view(PatchesView view) {
    view.channels *= view.kernel[2];
    view.kernel[2] = 1;
    return view;
  }
  static int64_t greatest_divisor(int64_t a, int64_t b) {
    while (b != 0) {
      const int64_t rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  }

  int64_t phase(int d, int64_t place) const { return place % period_[d] * view_.dilation[d] % view_.stride[d]; }
  int64_t shift(int d, int64_t place) const { return (place * view_.dilation[d] - phase(d, place)) / view_.stride[d]; }
  // Where a plane begins in the image, which may be outside of it.
  int64_t first_input(int d, int64_t plane) const { return phase(d, plane) - view_.padding[d]; }

  template <class Block>
  void copy_plane(Channels channels, int64_t image, int64_t begin, int64_t end, const int64_t* first,
                  uint8_t* to) const {
    const PatchesView& v = view_;
    const int64_t size = dtype_size(v.dtype);
    const auto* data = static_cast<const uint8_t*>(v.data) + image * v.image_stride * size;
    while (begin < end) {
      const int64_t x = begin % extent_[2], line = begin / extent_[2];
      const int64_t length = minimum(extent_[2] - x, end - begin);
      const int64_t z = line / extent_[1] * v.stride[0] + first[0], y = line % extent_[1] * v.stride[1] + first[1];
      const bool inside = z >= 0 && z < v.in[0] && y >= 0 && y < v.in[1];
      const uint8_t* from = inside ? data + (z * v.in_stride[0] + y * v.in_stride[1]) * size : nullptr;
      if (whole_lines_) {
        copy_windows<Block>(from, x, length, first[2], to);
      } else {
        copy_line<Block>(channels, from, x, length, first[2], to);
      }
      to += length * pitch_;
      begin += length;
    }
  }

  // What a line of the kernel meets from each of these places in a line of the image on.
  template <class Block>
  void copy_windows(const uint8_t* line, int64_t x, int64_t length, int64_t first, uint8_t* to) const {
    const PatchesView& v = image_;
    if (line == nullptr) return zero(length * pitch_, to);
    const int64_t left = first + x * v.stride[2], pixels = (length - 1) * v.stride[2] + v.kernel[2];
    const Scratch scratch(static_cast<size_t>(pixels * v.channels * element_ + 64));
    auto* run = scratch.as<uint8_t>();
    const int64_t pixel_bytes = v.channels * element_;
    const int64_t begin = minimum(maximum<int64_t>(0, -left), pixels);
    const int64_t end = maximum(begin, minimum(pixels, v.in[2] - left));
    zero(begin * pixel_bytes, run);
    if (end > begin) {
      copy_pixels<Block>(v, line + (left + begin) * v.in_stride[2] * dtype_size(v.dtype), end - begin,
                         reinterpret_cast<typename Block::A*>(run + begin * pixel_bytes));
    }
    zero((pixels - end) * pixel_bytes + 64, run + end * pixel_bytes);
    const int64_t window = view_.channels * element_;
    for (int64_t i = 0; i < length; ++i, run += v.stride[2] * pixel_bytes) {
      for (int64_t at = 0; at < window; at += 64, to += 64) copy_first(run + at, minimum<int64_t>(64, window - at), to);
      to += pitch_ - round_up(window, 64);
    }
  }

  // 64 bytes, of which all but the first `bytes` are zeros: what else is there may be no number.
  static XOPT_INLINE void copy_first(const uint8_t* from, int64_t bytes, uint8_t* to) {
    const __mmask64 inside = ~uint64_t{0} >> (64 - bytes);
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi8(inside, from));
  }

  // Positions x and on of a line; nullptr: one of zeros.
  template <class Block>
  void copy_line(Channels channels, const uint8_t* line, int64_t x, int64_t length, int64_t first, uint8_t* to) const {
    const PatchesView& v = view_;
    const int64_t stride = v.stride[2];
    const int64_t begin = first < 0 ? (-first + stride - 1) / stride : 0;  // the first position inside, and the last
    const int64_t end = first < v.in[2] ? (v.in[2] - 1 - first) / stride + 1 : 0;
    const int64_t inside = line == nullptr ? x + length : minimum(maximum(begin, x), x + length);
    const int64_t outside = maximum(inside, minimum(end, x + length));
    zero((inside - x) * pitch_, to);
    to += (inside - x) * pitch_;
    if (outside > inside) {
      const int64_t size = dtype_size(v.dtype), step = stride * v.in_stride[2] * size;
      const uint8_t* from = line + (inside * stride + first) * v.in_stride[2] * size + channels.begin * size;
      const bool dense = step == channels.count * size && pitch_ == channels.count * element_;
      const int64_t runs = dense ? 1 : outside - inside,
                    length_of_run = dense ? (outside - inside) * channels.count : channels.count;
      for (int64_t run = 0; run < runs; ++run) {
        // A group's channels are some lines each, far apart, that the hardware does not foresee.
        if (channels.count < v.channels && run + kRunsAhead < runs) {
          for (int64_t at = 0; at < length_of_run * size; at += 64) {
            __builtin_prefetch(from + (run + kRunsAhead) * step + at);
          }
        }
        copy_run<Block>(v.dtype, from + run * step, length_of_run,
                        reinterpret_cast<typename Block::A*>(to + run * pitch_));
      }
    }
    zero((x + length - outside) * pitch_, to + (outside - inside) * pitch_);
  }

  void zero(int64_t bytes, uint8_t* to) const {
    if (bytes > 0) __builtin_memset(to, static_cast<uint8_t>(view_.zero), static_cast<size_t>(bytes));
  }

  static constexpr int64_t kRunsAhead = 4;

  PatchesView image_, view_;
  bool whole_lines_;
  int64_t most_channels_;
  int64_t element_;                // bytes: int8 lies there as it is, floats as bf16
  int64_t period_[3], planes_[3];  // planes of a dimension, and after how many places of the kernel they come again
  int64_t extent_[3];              // of a plane: outputs, and what the kernel reaches beyond
  int64_t reach_ = 0, span_ = 0, pitch_;
};

}  // namespace xopt::XOPT_ISA
#endif
