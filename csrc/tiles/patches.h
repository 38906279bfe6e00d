// The view of a convolution: rows of A are the patches under a kernel that slides over a padded image.
//
// A line of the kernel (all its positions along the width) is one run of memory where pixels lie side by side and the
// dilation along the width is 1, so even three channels are copied 21 elements at a time under a 7 x 7 kernel;
// otherwise each position is a run of channels. What hangs over the border is cut off the run's ends and zeroed; with int8
// it becomes the zero point, which what follows the product takes for zero like any other.
#pragma once

#include "tiles/view.h"

namespace xopt::XOPT_ISA {

class Patches {
 public:
  static constexpr bool kInPlace = false;
  explicit Patches(const PatchesView& view)
      : view_(view),
        size_(dtype_size(view.dtype)),
        line_elements_(view.kernel[2] * view.channels),
        lines_are_runs_(view.dilation[2] == 1 && (view.in_stride[2] == view.channels || view.kernel[2] == 1)) {}

  class Rows {
   public:
    Rows() = default;
    Rows(const Patches& view, int64_t row, int64_t k) : view_(&view) {
      const PatchesView& v = view.view_;
      out_[2] = row % v.out[2];
      row /= v.out[2];
      out_[1] = row % v.out[1];
      row /= v.out[1];
      out_[0] = row % v.out[0];
      image_ = static_cast<const uint8_t*>(v.data) + row / v.out[0] * v.image_stride * view.size_;
      for (int i = 0; i < 3; ++i) in_[i] = out_[i] * v.stride[i] - v.padding[i];
      const int64_t line_elements = maximum<int64_t>(1, view.line_elements_), line = k / line_elements;
      first_ = k % line_elements;
      first_depth_ = line / v.kernel[1];
      first_height_ = line % v.kernel[1];
    }

    // Copies `count` elements of the next `rows` rows, and zeros up to `padded`.
    template <class Block>
    void copy(int64_t rows, int64_t count, int64_t padded, typename Block::A* to) {
      pad_rows<Block>(rows, count, padded, to);
      while (rows > 0) {
        const int64_t run = minimum(rows, rows_alike());
        copy_lines<Block>(run, count, to);
        to += run * Block::kStride;
        rows -= run;
        advance(run);
      }
    }

   private:
    template <class Block>
    XOPT_INLINE void zero(int64_t count, typename Block::A* to) const {
      if constexpr (Block::kIsInt) {
        const auto value = static_cast<typename Block::A>(view_->view_.zero + Block::kOffset);
        for (int64_t i = 0; i < count; ++i) to[i] = value;
      } else if (count > 0) {
        __builtin_memset(to, 0, static_cast<size_t>(count) * sizeof(*to));
      }
    }

    // How many patches from this one on lie in one line of the image and hang over neither end of it; 1 for one that
    // does hang over.
    int64_t rows_alike() const {
      const PatchesView& v = view_->view_;
      const int64_t last = v.in[2] - 1 - (v.kernel[2] - 1) * v.dilation[2];  // the last place for a kernel
      if (in_[2] < 0 || in_[2] > last) return 1;
      const int64_t inside = v.stride[2] == 1 ? last - in_[2] + 1 : (last - in_[2]) / v.stride[2] + 1;
      return minimum(inside, v.out[2] - out_[2]);
    }

    void advance(int64_t rows) {
      const PatchesView& v = view_->view_;
      out_[2] += rows;
      in_[2] += rows * v.stride[2];
      for (int i = 2; i >= 0; --i) {
        if (out_[i] < v.out[i]) return;
        out_[i] = 0;
        in_[i] = -v.padding[i];
        if (i > 0) {
          ++out_[i - 1];
          in_[i - 1] += v.stride[i - 1];
        }
      }
      image_ += v.image_stride * view_->size_;
    }

    // Line by line of the kernel, each for all of the rows.
    template <class Block>
    void copy_lines(int64_t rows, int64_t count, typename Block::A* to) const {
      const PatchesView& v = view_->view_;
      int64_t depth = first_depth_, height = first_height_, from = first_;
      while (count > 0) {
        const int64_t length = minimum(view_->line_elements_ - from, count);
        const int64_t d = in_[0] + depth * v.dilation[0], h = in_[1] + height * v.dilation[1];
        if (d < 0 || d >= v.in[0] || h < 0 || h >= v.in[1]) {
          for (int64_t row = 0; row < rows; ++row) zero<Block>(length, to + row * Block::kStride);
        } else {
          const int64_t offset = d * v.in_stride[0] + h * v.in_stride[1] + in_[2] * v.in_stride[2];
          copy_line<Block>(image_ + offset * view_->size_, rows, from, from + length, to);
        }
        to += length;
        count -= length;
        from = 0;
        if (++height == v.kernel[1]) {
          height = 0;
          ++depth;
        }
      }
    }

    // Elements [begin, end) of a line of the kernel; `line` is where its first position would be. Several rows hang over
    // no end.
    template <class Block>
    void copy_line(const uint8_t* line, int64_t rows, int64_t begin, int64_t end, typename Block::A* to) const {
      const PatchesView& v = view_->view_;
      const int64_t step = v.stride[2] * v.in_stride[2] * view_->size_;
      if (view_->lines_are_runs_) {
        const int64_t first_inside = minimum(v.kernel[2], maximum<int64_t>(0, -in_[2])) * v.channels;
        const int64_t last_inside = maximum<int64_t>(0, minimum(v.kernel[2], v.in[2] - in_[2])) * v.channels;
        const int64_t first = minimum(end, maximum(begin, first_inside));
        const int64_t last = maximum(first, minimum(end, last_inside));
        if (last > first) {
          copy_runs<Block>(v.dtype, line + first * view_->size_, step, rows, last - first, to + (first - begin));
        }
        if (last - first == end - begin) return;
        zero<Block>(first - begin, to);
        zero<Block>(end - last, to + (last - begin));
        return;
      }
      int64_t position = begin / v.channels, channel = begin % v.channels;
      while (begin < end) {
        const int64_t length = minimum(v.channels - channel, end - begin), w = in_[2] + position * v.dilation[2];
        if (w < 0 || w >= v.in[2]) {
          zero<Block>(length, to);
        } else {
          const int64_t offset = position * v.dilation[2] * v.in_stride[2] + channel;
          copy_runs<Block>(v.dtype, line + offset * view_->size_, step, rows, length, to);
        }
        to += length;
        begin += length;
        channel = 0;
        ++position;
      }
    }

    const Patches* view_ = nullptr;
    const uint8_t* image_ = nullptr;
    int64_t out_[3] = {0, 0, 0};                              // the output position
    int64_t in_[3] = {0, 0, 0};                               // where the kernel begins, which may be outside
    int64_t first_ = 0, first_depth_ = 0, first_height_ = 0;  // where k begins: element of which line of the kernel
  };

  Rows rows(int64_t row, int64_t k) const { return Rows(*this, row, k); }

  // Neighbouring patches share most of their lines, and what is new follows what was read: the hardware fetches it.
  Prefetch prefetch(int64_t, int64_t, int64_t, int64_t) const { return {nullptr, 0, 0, 0}; }

 private:
  PatchesView view_;
  int64_t size_, line_elements_;
  bool lines_are_runs_;
};

}  // namespace xopt::XOPT_ISA
