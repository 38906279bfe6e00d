// The view of a convolution whose vector blocks read rows out of an image, with no copy of patches.
//
// What is under a line of the kernel is one run of memory, and rows of A, which are outputs side by side, begin a stride of
// pixels apart. That is all a block wants of its rows: where they begin, and which pieces along k lie side by side in them
// as in the packed weight. The image is read where it is, if no block reads anything outside of it. Else what is read is a
// copy of some lines with their zeros around them, in the block's own dtype, a ninth under a 3 x 3 kernel of what patches
// would be; it stays in L2.
//
// Products with what is outside of the image are left out: for lines of the kernel that are outside for all rows of a
// block, and for columns that are outside for the first or the last row, where that begins or ends a line of outputs. Of
// an image of 14 x 14 that is a tenth of all products, of one of 7 x 7 a fifth.
#pragma once

#include "tiles/pixels.h"

namespace xopt::XOPT_ISA {

class ImageRows {
 public:
  static constexpr bool kInPlace = true;

  // For blocks with tiles of `tile_k` values. `diagonal`: as in BlockCall. It reads the image itself until it is told to
  // copy.
  ImageRows(const PatchesView& view, int64_t tile_k, int64_t diagonal)
      : view_(view),
        diagonal_(diagonal),
        data_(static_cast<const uint8_t*>(view.data)),
        element_(dtype_size(view.dtype)) {
    for (int d = 0; d < 3; ++d) {
      span_[d] = (view.kernel[d] - 1) * view.dilation[d] + 1;
      extent_[d] = (view.out[d] - 1) * view.stride[d] + span_[d];
    }
    steps_ = {view.image_stride, view.in_stride[0], view.in_stride[1], view.in_stride[2], 0};
    steps_.origin = -(view.padding[0] * steps_.plane + view.padding[1] * steps_.line + view.padding[2] * steps_.pixel);
    // A run is what a line of the kernel meets, or a position of it.
    whole_tiles_ = (diagonal > 0 ? diagonal : view.channels) % tile_k == 0;
    positions_ = view.dilation[2] == 1 && !whole_tiles_ && diagonal == 0 ? view.kernel[2] : 1;
  }

  // Whether blocks whose rows are within a line of outputs read nothing outside of the image.
  bool stays_inside() const {
    const PatchesView& v = view_;
    constexpr int64_t kFarthest = 1 << 28;  // what a piece can say
    if (!whole_tiles_ || v.dilation[1] != 1 || v.kernel[0] != 1 || v.padding[0] != 0) return false;
    for (int64_t column = 0; column < v.kernel[2]; ++column) {
      if (outside_before(column) + outside_behind(column) > 1) return false;
    }
    return span_[1] * steps_.line + span_[2] * steps_.pixel < kFarthest;
  }

  int64_t runs() const { return view_.kernel[0] * view_.kernel[1] * (view_.kernel[2] / positions_); }
  int64_t run_elements() const { return positions_ * view_.channels; }
  // Distance of rows, in elements.
  int64_t row_step() const { return view_.stride[2] * steps_.pixel; }

  // Lines that some outputs read, of all images with their zeros one after the other.
  struct Lines {
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  Lines lines_under(int64_t first_row, int64_t end_row) const {
    const int64_t reach = (span_[0] - 1) * extent_[1] + span_[1];
    return {line_of(place_of(first_row)), line_of(place_of(end_row - 1)) + reach};
  }
  int64_t line_elements() const { return extent_[2] * view_.channels; }
  int64_t columns() const { return view_.out[2]; }  // of outputs

  // From here on pieces and rows are those of a copy, which has to be made before rows are read.
  template <class Block>
  void read_copy() {
    const int64_t line = line_elements(), plane = extent_[1] * line;
    steps_ = {extent_[0] * plane, plane, line, view_.channels, 0};
    element_ = sizeof(typename Block::A);
    copies_ = true;
  }
  template <class Block>
  void copy(Lines lines, typename Block::A* to) {
    steps_.origin = -lines.begin * steps_.line;
    data_ = reinterpret_cast<const uint8_t*>(to);
    for (int64_t line = lines.begin; line < lines.end; ++line, to += steps_.line) copy_line<Block>(line, to);
  }

  // The pieces of a k block, which begins with the tile `first`; returns how many.
  template <class Block>
  int64_t make_pieces(int64_t first, int64_t tiles, Piece* pieces) const {
    if (diagonal_ > 0) return make_diagonal_pieces<Block>(first, tiles, pieces);
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
      pieces[count] = piece_at<Block>(k / view_.channels, a, b, whole, rest);
      pieces[count++].ends_chain = chain == 0 ? 1 : 0;
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
  // image of 14 x 14 every seventh block, the line's are left out.
  void set_pieces(int64_t k_block, BlockCall* block) {
    block->pieces = pieces_.data + k_block * pieces_.most;
    block->k_tiles = pieces_.counts[k_block];
    block->outside = outside_;
    block->diagonal = diagonal_;
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
    if (count == 0) pieces_.needed[count++] = Piece{};  // of nothing, after which sums are added up
    block->pieces = pieces_.needed;
    block->k_tiles = count;
  }

  const uint8_t* data() const { return data_; }
  // Where some rows begin, those with a pointer, in bytes from data(); the others follow by step_bytes().
  void set_rows(int64_t row, int64_t rows, int64_t* offsets) {
    // Divisions, which rows do without that go on from the last ones in a line.
    if (row != next_row_) next_ = place_of(row);
    const int64_t columns = view_.out[2];
    set_lines_inside(next_, rows);
    outside_ = next_.column == 0 ? kFirstOutside : 0;
    if ((next_.column + rows) % columns == 0) outside_ |= kLastOutside;
    first_ = next_;
    rows_ = rows;
    next_row_ = row + rows;
    const int64_t step = kRowsOfPointer * step_bytes();
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
  }
  int64_t step_bytes() const { return row_step() * element_; }

  // Lines that the next line of outputs is the first to read out of the image: of these rows' share, the part-th of so many
  // parts, over some steps. A copy has been fetched by being made.
  Prefetch lines_ahead(int64_t part, int64_t parts, int64_t steps) const {
    const PatchesView& v = view_;
    const bool dense = steps_.line == v.in[2] * v.channels;
    if (copies_ || !dense || first_.height + 1 == v.out[1]) return {};
    const int64_t end = minimum(v.in[1], (first_.height + 1) * v.stride[1] - v.padding[1] + v.kernel[1]);
    const int64_t lines = minimum(minimum(v.stride[1], v.kernel[1]), end);
    if (lines <= 0) return {};
    const int64_t bytes = lines * steps_.line * element_, shares = v.out[2] * parts;
    const int64_t at = (first_.image * steps_.image + (end - lines) * steps_.line) * element_;
    const int64_t count = ceil_div(bytes * rows_, 64 * steps * shares);
    return {data_ + at + bytes * (first_.column * parts + rows_ * part) / shares, 64 * count, 64, count};
  }

 private:
  struct Place {
    int64_t column, height, depth, image;
  };
  // In elements; `origin` is where the first row begins.
  struct Steps {
    int64_t image, plane, line, pixel, origin;
  };

  // Outputs at the beginning of a line, and at its end, for which a column of the kernel lies outside of the image.
  int64_t outside_before(int64_t column) const {
    const int64_t pixels = view_.padding[2] - column * view_.dilation[2];
    return pixels <= 0 ? 0 : ceil_div(pixels, view_.stride[2]);
  }
  int64_t outside_behind(int64_t column) const {
    const int64_t pixels = view_.in[2] + view_.padding[2] - column * view_.dilation[2];
    return maximum<int64_t>(0, view_.out[2] - (pixels <= 0 ? 0 : ceil_div(pixels, view_.stride[2])));
  }
  uint8_t rows_outside(int64_t column) const {
    if (outside_before(column) > 0) return kFirstOutside;
    return outside_behind(column) > 0 ? kLastOutside : 0;
  }
  // Lines of the kernel that lie inside of the image for some of so many rows.
  void set_lines_inside(const Place& first, int64_t rows) {
    const PatchesView& v = view_;
    lines_inside_ = {0, v.kernel[1]};
    const int64_t last_column = first.column + rows - 1;
    const int64_t last_height = first.height + (last_column < v.out[2] ? 0 : last_column / v.out[2]);
    if (v.dilation[1] != 1 || last_height >= v.out[1]) return;
    const int64_t begin = minimum(v.kernel[1], maximum<int64_t>(0, v.padding[1] - last_height * v.stride[1]));
    const int64_t end = minimum(v.kernel[1], v.in[1] + v.padding[1] - first.height * v.stride[1]);
    lines_inside_ = {begin, maximum(begin, end)};
  }
  // One for each position of the kernel whose first tile is in the k block: of the first columns' values there.
  template <class Block>
  int64_t make_diagonal_pieces(int64_t first, int64_t tiles, Piece* pieces) const {
    constexpr int64_t kGroup = Block::kTileK / kTileRows, kChain = Block::kChainTiles * Block::kTileK;
    const int64_t of_position = view_.channels / Block::kTileK, begin = ceil_div(first, of_position);
    const int64_t end = minimum(runs(), ceil_div(first + tiles, of_position));
    int64_t count = 0;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t b = (position * of_position - first) * 2 * kTileBytes;
      const int64_t rows = diagonal_ % Block::kTileK / kGroup;
      pieces[count] = piece_at<Block>(position, run_offset(position), b, diagonal_ / Block::kTileK, rows);
      // Where it ends with the zeros between, for the same sums: `channels` is 32.
      pieces[count++].ends_chain = (position + 1 - begin) * view_.channels % kChain == 0 ? 1 : 0;
    }
    if (count == 0) pieces[count++] = Piece{};
    return count;
  }
  // At a position of the kernel, `a` elements from where rows begin and `b` bytes from where the weights do.
  template <class Block>
  Piece piece_at(int64_t position, int64_t a, int64_t b, int64_t tiles, int64_t rows) const {
    Piece piece{};
    piece.a = static_cast<int32_t>(a * static_cast<int64_t>(sizeof(typename Block::A)));
    piece.b = static_cast<int32_t>(b);
    piece.tiles = static_cast<uint8_t>(tiles);
    piece.rows = static_cast<uint8_t>(rows);
    piece.line = static_cast<int32_t>(position / view_.kernel[2] % view_.kernel[1]);
    piece.outside = whole_tiles_ ? rows_outside(position % view_.kernel[2]) : 0;
    return piece;
  }
  // In elements, from where a row begins.
  int64_t run_offset(int64_t run) const {
    const PatchesView& v = view_;
    const int64_t of_line = v.kernel[2] / positions_, line = run / of_line;
    const int64_t depth = line / v.kernel[1] * v.dilation[0], height = line % v.kernel[1] * v.dilation[1];
    return depth * steps_.plane + height * steps_.line + run % of_line * v.dilation[2] * steps_.pixel;
  }
  Place place_of(int64_t row) const {
    const PatchesView& v = view_;
    const int64_t column = row % v.out[2];
    row /= v.out[2];
    const int64_t height = row % v.out[1];
    row /= v.out[1];
    return {column, height, row % v.out[0], row / v.out[0]};
  }
  int64_t line_of(const Place& place) const {
    const int64_t plane = place.image * extent_[0] + place.depth * view_.stride[0];
    return plane * extent_[1] + place.height * view_.stride[1];
  }
  int64_t offset_of(const Place& place) const {
    const int64_t line = place.image * steps_.image + place.depth * view_.stride[0] * steps_.plane +
                         place.height * view_.stride[1] * steps_.line;
    return (steps_.origin + line + place.column * row_step()) * element_;
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
  int64_t diagonal_;
  int64_t span_[3];    // of the kernel
  int64_t extent_[3];  // of an image with its zeros, as far as it is read
  bool whole_tiles_;   // is each position of the kernel
  int64_t positions_;
  Steps steps_;
  const uint8_t* data_;
  int64_t element_;
  bool copies_ = false;
  Pieces pieces_{};
  // Of the rows that set_rows was told of:
  Lines lines_inside_{};  // of the kernel
  uint8_t outside_ = 0;
  int64_t rows_ = 0, next_row_ = -1;
  Place first_{}, next_{};  // of the first, and of the row after them
};

}  // namespace xopt::XOPT_ISA
