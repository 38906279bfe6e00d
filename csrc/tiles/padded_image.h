// The view of a convolution whose vector blocks read an image as it lies, with no copy of patches.
//
// What is under a line of the kernel is one run of memory, and rows of A, which are outputs side by side, begin a stride of
// pixels apart. That is all a block wants of its rows: where they begin, and which pieces along k lie side by side in them
// as in the packed weight. What is read is a copy of some lines of the image with their zeros around them, in the block's
// own dtype, a ninth under a 3 x 3 kernel of what patches would be; it stays in L2.
#pragma once

#include "tiles/pixels.h"

namespace xopt::XOPT_ISA {

class PaddedImage {
 public:
  static constexpr bool kInPlace = true;

  explicit PaddedImage(const PatchesView& view) : view_(view) {
    for (int d = 0; d < 3; ++d) span_[d] = (view.kernel[d] - 1) * view.dilation[d] + 1;
    for (int d = 0; d < 3; ++d) extent_[d] = (view.out[d] - 1) * view.stride[d] + span_[d];
    line_elements_ = extent_[2] * view.channels;
    // A run is what a line of the kernel meets, or a position of it.
    positions_ = view.dilation[2] == 1 ? view.kernel[2] : 1;
  }

  // Lines that some outputs read, of all images one after the other.
  struct Lines {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  Lines lines_under(int64_t first_row, int64_t end_row) const {
    const int64_t reach = (span_[0] - 1) * extent_[1] + span_[1];
    return {line_of(first_row), line_of(end_row - 1) + reach};
  }
  int64_t line_elements() const { return line_elements_; }
  int64_t runs() const { return view_.kernel[0] * view_.kernel[1] * (view_.kernel[2] / positions_); }
  int64_t run_elements() const { return positions_ * view_.channels; }
  // Distance of rows, in elements.
  int64_t row_step() const { return view_.stride[2] * view_.channels; }

  // Copies these lines, from which rows are read from then on.
  template <class Block>
  void copy(Lines lines, typename Block::A* to) {
    lines_ = lines;
    data_ = reinterpret_cast<const uint8_t*>(to);
    element_ = sizeof(*to);
    for (int64_t line = lines.begin; line < lines.end; ++line, to += line_elements_) copy_line<Block>(line, to);
  }

  // The pieces of a k block, which begins with the tile `first`; returns how many.
  template <class Block>
  int64_t make_pieces(int64_t first, int64_t tiles, Piece* pieces) const {
    constexpr int64_t kGroup = Block::kTileK / kTileRows, kChain = Block::kChainTiles * Block::kTileK;
    const int64_t all = runs() * run_elements(), end = minimum(all, (first + tiles) * Block::kTileK);
    int64_t count = 0, chain = 0;  // elements of it
    for (int64_t k = first * Block::kTileK; k < end;) {
      // To the end of the run, of the chain, and of the tile, or of several whole tiles.
      const int64_t in_tile = k % Block::kTileK, most = minimum(end - k, kChain - chain);
      int64_t length = minimum(run_elements() - k % run_elements(), most);
      if (in_tile > 0) length = minimum(length, Block::kTileK - in_tile);
      const int64_t whole = in_tile > 0 ? 0 : length / Block::kTileK;
      const int64_t rest = whole > 0 ? 0 : length / kGroup;
      if (whole > 0) length = whole * Block::kTileK;
      const int64_t a = run_offset(k / run_elements()) + k % run_elements();
      const int64_t b = (k / Block::kTileK - first) * 2 * kTileBytes + in_tile / kGroup * 64;
      chain = (chain + length) % kChain;
      Piece& piece = pieces[count++];
      piece.a = static_cast<int32_t>(a * static_cast<int64_t>(sizeof(typename Block::A)));
      piece.b = static_cast<int32_t>(b);
      piece.tiles = static_cast<uint8_t>(whole);
      piece.rows = static_cast<uint8_t>(rest);
      piece.line = static_cast<int32_t>(k / (view_.kernel[2] * view_.channels) % view_.kernel[1]);
      piece.ends_chain = chain == 0 ? 1 : 0;
      k += length;
    }
    return count;
  }

  // Those of all k blocks, each in as much room, and room for those that a row block needs.
  struct Pieces {
    const Piece* data;
    const int64_t* counts;
    int64_t most;
    Piece* needed;
  };
  void use(const Pieces& pieces) { pieces_ = pieces; }
  // Those of a k block. Where all rows that set_rows was told of have a line of the kernel outside of the image, in an
  // image of 14 x 14 every seventh block, the line's are left out; but one, since there have to be some.
  void set_pieces(int64_t k_block, BlockCall* block) {
    block->pieces = pieces_.data + k_block * pieces_.most;
    block->k_tiles = pieces_.counts[k_block];
    if (lines_inside_.count() == view_.kernel[1]) return;
    int64_t count = 0;
    for (int64_t i = 0; i < block->k_tiles; ++i) {
      const Piece& piece = block->pieces[i];
      if (piece.line >= lines_inside_.begin && piece.line < lines_inside_.end) {
        pieces_.needed[count++] = piece;
      } else if (count > 0) {
        pieces_.needed[count - 1].ends_chain |= piece.ends_chain;  // the same sums with and without
      }
    }
    if (count == 0) pieces_.needed[count++] = block->pieces[0];
    block->pieces = pieces_.needed;
    block->k_tiles = count;
  }

  const uint8_t* data() const { return data_; }
  int64_t row_bytes() const { return row_step() * element_; }
  // Where some rows begin, those with a pointer, in bytes from there.
  void set_rows(int64_t row, int64_t rows, int64_t* offsets) {
    // Divisions, which rows do without that go on from the last ones in a line.
    if (row != next_row_) next_ = place_of(row);
    set_lines_inside(next_, rows);
    const int64_t columns = view_.out[2], step = kRowsOfPointer * row_bytes();
    int64_t offset = offset_of(next_);
    for (int64_t begin = 0; begin < rows; begin += kRowsOfPointer) {
      *offsets++ = offset;
      offset += step;
      const int64_t here = minimum<int64_t>(kRowsOfPointer, rows - begin);
      next_.column += here;
      if (next_.column < columns) continue;
      next_ = place_of(row + begin + here);
      offset = offset_of(next_);
    }
    next_row_ = row + rows;
  }

 private:
  // An output: in which column of which line, and the first line that it reads.
  struct Place {
    int64_t column, height, line;
  };
  // Lines of the kernel that lie inside of the image for some of so many rows.
  void set_lines_inside(const Place& first, int64_t rows) {
    const PatchesView& v = view_;
    lines_inside_ = {0, v.kernel[1]};
    const int64_t last_column = first.column + rows - 1;
    const int64_t last_height = first.height + (last_column < v.out[2] ? 0 : last_column / v.out[2]);
    if (v.dilation[1] != 1 || last_height >= v.out[1]) return;
    const int64_t begin = v.padding[1] - last_height * v.stride[1];
    const int64_t stop = v.in[1] + v.padding[1] - first.height * v.stride[1];
    if (begin < v.kernel[1] && stop > 0) lines_inside_ = {maximum<int64_t>(0, begin), minimum(v.kernel[1], stop)};
  }
  // In elements, from where a row begins.
  int64_t run_offset(int64_t run) const {
    const PatchesView& v = view_;
    const int64_t of_line = v.kernel[2] / positions_, line = run / of_line;
    const int64_t depth = line / v.kernel[1] * v.dilation[0], height = line % v.kernel[1] * v.dilation[1];
    return (depth * extent_[1] + height) * line_elements_ + run % of_line * v.dilation[2] * v.channels;
  }
  Place place_of(int64_t row) const {
    const PatchesView& v = view_;
    const int64_t column = row % v.out[2];
    row /= v.out[2];
    const int64_t height = row % v.out[1];
    row /= v.out[1];
    const int64_t depth = row % v.out[0], image = row / v.out[0];
    const int64_t line = (image * extent_[0] + depth * v.stride[0]) * extent_[1] + height * v.stride[1];
    return {column, height, line};
  }
  int64_t line_of(int64_t row) const { return place_of(row).line; }
  int64_t offset_of(const Place& place) const {
    return ((place.line - lines_.begin) * line_elements_ + place.column * row_step()) * element_;
  }

  template <class Block>
  void copy_line(int64_t line, typename Block::A* to) const {
    const PatchesView& v = view_;
    const int64_t height = line % extent_[1] - v.padding[1];
    line /= extent_[1];
    const int64_t depth = line % extent_[0] - v.padding[0], image = line / extent_[0];
    const bool is_inside = height >= 0 && height < v.in[1] && depth >= 0 && depth < v.in[0];
    // A phase of a transposed convolution may begin within the image: its padding is negative.
    const int64_t start = maximum<int64_t>(0, -v.padding[2]);
    const int64_t left = minimum(maximum<int64_t>(0, v.padding[2]), extent_[2]);
    const int64_t pixels = is_inside ? maximum<int64_t>(0, minimum(v.in[2] - start, extent_[2] - left)) : 0;
    zero(left, to);
    to += left * v.channels;
    if (pixels > 0) {
      const int64_t first =
          image * v.image_stride + depth * v.in_stride[0] + height * v.in_stride[1] + start * v.in_stride[2];
      copy_pixels<Block>(v, static_cast<const uint8_t*>(v.data) + first * dtype_size(v.dtype), pixels, to);
    }
    zero(extent_[2] - left - pixels, to + pixels * v.channels);
  }
  template <class A>
  void zero(int64_t pixels, A* to) const {
    if (pixels > 0) __builtin_memset(to, 0, static_cast<size_t>(pixels * view_.channels) * sizeof(*to));
  }

  PatchesView view_;
  int64_t span_[3];    // of the kernel
  int64_t extent_[3];  // of an image with its zeros, as far as it is read
  int64_t line_elements_, positions_;
  Pieces pieces_{};
  Lines lines_{};         // of the copy
  Lines lines_inside_{};  // of the kernel
  const uint8_t* data_ = nullptr;
  int64_t element_ = 0;
  Place next_{};  // of the row after the last that set_rows was told of
  int64_t next_row_ = -1;
};

}  // namespace xopt::XOPT_ISA
