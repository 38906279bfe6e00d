// Convolutions whose vector blocks read rows out of the image, or out of a copy with zeros around it (tiles/image_rows.h).
//
//   thread    a range of row blocks x a range of panels
//    chunk      row blocks whose lines of the image stay in L2: these are copied, if need be; or, where L2 does not hold the
//               lines under one of outputs, a strip's part of a line, and then of the next
//     GemmThread  the chunk's products, with nothing more to copy
#pragma once

#include "kernels/conv_loop.h"
#include "tiles/block_rows.h"
#include "tiles/image_rows.h"

namespace xopt::XOPT_ISA {

// Columns that have channels to themselves, as BlockCall has it: whole vectors of narrow groups, which else would be
// multiplied with each other's zeros.
template <class Block>
int64_t diagonal_of(const ConvCall& call) {
  const int64_t group = call.group_in == call.group_out ? call.group_in : 0;
  const int64_t columns = maximum<int64_t>(group, kWidth);
  const bool is_part = group > 1 && kTileColumns % columns == 0 && columns % group == 0;
  // Of a whole panel: a block goes through all columns, and behind fewer channels nothing may follow.
  return is_part && call.input.channels == kPanelColumns ? columns : 0;
}

template <class Block>
struct ImagePlan {
  explicit ImagePlan(const ConvCall& call)
      : image(call.input, Block::kTileK, diagonal_of<Block>(call)),
        blocks(blocks_of_lines(call)),
        copies(!reads_image(call.input)) {
    if (!copies) return;
    const int64_t rows = rows_of_copy(call);
    has_blocks = rows > 0;
    if (has_blocks) blocks = RowBlocks(blocks.rows, rows, false);
    image.template read_copy<Block>();
  }

  // Whether blocks can read rows there, and it pays. It is the same for some lines of an image as for all.
  bool chosen(const ConvCall& call) const {
    const PatchesView& v = call.input;
    if (call.tuning.path == TunedPath::patches || v.channels == 0 || !has_blocks) return false;
    if (image.run_elements() % (Block::kTileK / kTileRows) != 0 || !rows_stay_in_l1(v, blocks.block_rows)) return false;
    return !copies || (overlaps(v) && two_lines_fit(v));
  }

  // Of the image itself: rows of a line of outputs each, as many as stay in L1.
  RowBlocks blocks_of_lines(const ConvCall& call) const {
    const int64_t rows = product_call(call, 0).m, width = call.input.out[2];
    for (int64_t most = Block::kRows; leaves_out_rows<Block>(most); --most) {
      const RowBlocks cut = RowBlocks::of_lines(rows, width, most);
      if (rows_stay_in_l1(call.input, cut.block_rows)) return cut;
    }
    return RowBlocks::of_lines(rows, width, Block::kRows);
  }
  // Whether blocks do with what is in the image.
  bool reads_image(const PatchesView& v) const {
    return leaves_out_rows<Block>(blocks.least_rows()) && is_as_it_multiplies(v) && image.stays_inside();
  }

  // Of a copy: rows within a line of outputs, as many as a block takes, or about as many (blocks of eight lost 4 to 10% in
  // lines of 64 and 128), or a whole short line; else pairs that share a pointer, which do not lie in different lines.
  // 0: there is no such block.
  static int64_t rows_of_copy(const ConvCall& call) {
    const int64_t width = call.input.out[2];
    constexpr int64_t kLeastRows = Block::kRows - Block::kRows / 6;
    for (int64_t rows = Block::kRows; rows >= kLeastRows; --rows) {
      if (width % rows == 0) return rows;
    }
    if (width <= Block::kRows && leaves_out_rows<Block>(width)) return width;
    if (width % kRowsOfPointer != 0) return 0;
    const int64_t even = RowBlocks(product_call(call, 0).m, Block::kRows, true).block_rows;
    return round_up(even, int64_t{kRowsOfPointer});
  }

  // Whether values of the image are what a block multiplies.
  static bool is_as_it_multiplies(const PatchesView& v) {
    constexpr bool kPairs = std::is_same_v<typename Block::A, Bf16>;
    if (!kPairs && !std::is_same_v<typename Block::Round, float>) return false;
    return v.dtype == (kPairs ? DType::bf16 : DType::f32) && v.channel_stride == 1;
  }

  // Beside their weights, while panels pass.
  bool rows_stay_in_l1(const PatchesView& v, int64_t rows) const {
    constexpr int64_t kElement = sizeof(typename Block::A), kRowBytes = Block::kMaxTiles * Block::kTileK * kElement;
    const int64_t bytes = minimum(kRowBytes, v.kernel[2] * v.channels * kElement), step = image.row_step() * kElement;
    return step <= bytes || stay_in_l1(rows, bytes, step);
  }

  // Blocks of a line, next to each other, whose pixels stay in L2 from line to line beside the weights. Weights that do not
  // stay there are worth whole lines.
  int64_t strip_blocks(const PackedWeight& w) const {
    if (w.panels * w.panel_bytes > l2_bytes() * 5 / 8) return blocks.blocks_of_line;
    const int64_t block_bytes = bytes(image.lines_under(0, blocks.line_rows)) / blocks.blocks_of_line;
    return maximum<int64_t>(4, l2_bytes() / 4 / block_bytes);
  }

  int64_t bytes(ImageRows::Lines lines) const {
    return lines.count() * image.line_elements() * static_cast<int64_t>(sizeof(typename Block::A));
  }
  bool two_lines_fit(const PatchesView& v) const {
    return bytes(image.lines_under(0, minimum(v.out[1], int64_t{2}) * v.out[2])) <= l2_bytes() * 3 / 4;
  }

  ImageRows image;  // any product's: they are alike
  RowBlocks blocks;
  bool has_blocks = true;
  bool copies;  // lines of the image, with zeros around them
};

// The pieces of all k blocks.
template <class Block>
class PieceTable {
 public:
  PieceTable(const ImageRows& image, const GemmPlan<Block>& plan, int64_t k_tiles)
      : most_(plan.k_block_tiles + minimum(image.runs(), plan.k_block_tiles * Block::kTileK)),
        pieces_(static_cast<size_t>(plan.k_blocks * most_) * sizeof(Piece)),
        counts_(static_cast<size_t>(plan.k_blocks) * sizeof(int64_t)) {
    for (int64_t kb = 0; kb < plan.k_blocks; ++kb) {
      auto* pieces = pieces_.as<Piece>() + kb * most_;
      counts_.as<int64_t>()[kb] = image.make_pieces<Block>(kb * plan.k_block_tiles, plan.tiles_of(kb, k_tiles), pieces);
    }
  }
  int64_t block_bytes() const { return most_ * static_cast<int64_t>(sizeof(Piece)); }
  ImageRows::Pieces pieces(Piece* needed) const { return {pieces_.as<Piece>(), counts_.as<int64_t>(), most_, needed}; }

 private:
  int64_t most_;
  Scratch pieces_, counts_;
};

// Parts of lines, a strip after the other, each from its first line to its last.
template <class Compute>
void each_strip(int64_t of_line, int64_t strip_blocks, Range blocks, const Compute& compute) {
  const int64_t strips = ceil_div(of_line, strip_blocks);
  for (int64_t i = 0; i < strips; ++i) {
    const Range strip = share(of_line, strips, i);
    for (int64_t line = blocks.begin / of_line * of_line; line < blocks.end; line += of_line) {
      const Range part{maximum(blocks.begin, line + strip.begin), minimum(blocks.end, line + strip.end)};
      if (part.size() > 0) compute(part);
    }
  }
}

template <class Block>
void compute_from_image(const GemmCall& gemm, ImageRows image, const ImagePlan<Block>& images,
                        const GemmPlan<Block>& plan, EpilogueFn* epilogue, Range blocks, Range panels,
                        int64_t weights_end) {
  const auto lines_of = [&](int64_t begin, int64_t end) {
    return image.lines_under(plan.first_row(begin), plan.first_row(end));
  };
  const int64_t strip = images.copies ? plan.blocks_of_line : images.strip_blocks(gemm.weight);
  if (strip < plan.blocks_of_line) {
    return each_strip(plan.blocks_of_line, strip, blocks, [&](Range part) {
      GemmThread<Block, ImageRows>(gemm, image, plan, epilogue, 0).compute(part, panels, weights_end);
    });
  }
  // Weights that do not stay in L2 are read again for each chunk.
  const int64_t most_bytes = plan.weights_stay(gemm.weight) ? l2_bytes() / 8 : l2_bytes() * 3 / 8;
  // At least two lines of outputs: each chunk copies all lines under it.
  const int64_t most_chunks = maximum<int64_t>(1, blocks.size() * plan.block_rows / (2 * image.columns()));
  int64_t chunks = 1;
  while (chunks < most_chunks &&
         images.bytes(lines_of(blocks.begin, blocks.begin + ceil_div(blocks.size(), chunks))) > most_bytes) {
    ++chunks;
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range part = share(blocks.size(), chunks, chunk);
    const Range mine{blocks.begin + part.begin, blocks.begin + part.end};
    const ImageRows::Lines lines = lines_of(mine.begin, mine.end);
    const Scratch copy(static_cast<size_t>(images.copies ? images.bytes(lines) : 0));
    if (images.copies) image.copy<Block>(lines, copy.as<typename Block::A>());
    GemmThread<Block, ImageRows>(gemm, image, plan, epilogue, 0).compute(mine, panels, weights_end);
  }
}

template <class Block>
void conv_from_image(const ConvCall& call, const ImagePlan<Block>& images) {
  const GemmCall first = product_call(call, 0);
  const GemmPlan<Block> plan(first, images.blocks, GemmPlan<Block>::Rows::in_place_of_view);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  const PieceTable<Block> table(images.image, plan, first.weight.k_tiles);
  each_part(call, plan, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels, int64_t weights_end) {
    ImageRows image(product_input(call, product), Block::kTileK, diagonal_of<Block>(call));
    if (images.copies) image.read_copy<Block>();
    const Scratch needed(static_cast<size_t>(table.block_bytes()));
    image.use(table.pieces(needed.as<Piece>()));
    compute_from_image<Block>(gemm, image, images, plan, epilogue, blocks, panels, weights_end);
  });
}

template <class Block>
void conv_from_image_or_patches(const ConvCall& call) {
  const ImagePlan<Block> images(call);
  if (images.chosen(call)) return conv_from_image(call, images);
  conv_with<Block>(call);
}

}  // namespace xopt::XOPT_ISA
