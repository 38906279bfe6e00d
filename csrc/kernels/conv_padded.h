// Convolutions whose vector blocks read rows out of a padded image (tiles/padded_image.h).
//
//   thread    a range of row blocks x a range of panels
//    chunk      row blocks whose lines of the image stay in L2: these are copied, with zeros around them
//     GemmThread  the chunk's products, with nothing to copy
#pragma once

#include "kernels/conv_loop.h"
#include "tiles/block_rows.h"
#include "tiles/padded_image.h"

namespace xopt::XOPT_ISA {

template <class Block>
struct PaddedPlan {
  explicit PaddedPlan(const ConvCall& call) : image(call.input) {}

  // Whether blocks can read rows there, and it pays. It is the same for some lines of an image as for all.
  bool chosen(const ConvCall& call) const {
    const PatchesView& v = call.input;
    if (call.tuning.path == TunedPath::patches || v.channels == 0) return false;
    if (image.run_elements() % (Block::kTileK / kTileRows) != 0) return false;
    return overlaps(v) && rows_of_block(v.out[2], Block::kRows) > 0 && rows_stay_in_l1() && two_lines_fit(v);
  }

  // About `rows`, none of which share a pointer and lie in different lines; 0: they would be few.
  static int64_t rows_of_block(int64_t width, int64_t rows) {
    if (width % kRowsOfPointer == 0) return round_up(rows, int64_t{kRowsOfPointer});
    for (rows = Block::kRows; rows * 6 >= Block::kRows * 5; --rows) {
      if (width % rows == 0) return rows;
    }
    return 0;
  }

  // Beside their weights, while panels pass.
  bool rows_stay_in_l1() const {
    constexpr int64_t kElement = sizeof(typename Block::A), kRowBytes = Block::kMaxTiles * Block::kTileK * kElement;
    const int64_t bytes = minimum(kRowBytes, image.run_elements() * kElement), step = image.row_step() * kElement;
    return step <= bytes || stay_in_l1(Block::kRows, bytes, step);
  }

  int64_t bytes(PaddedImage::Lines lines) const {
    return lines.count() * image.line_elements() * static_cast<int64_t>(sizeof(typename Block::A));
  }
  bool two_lines_fit(const PatchesView& v) const {
    return bytes(image.lines_under(0, minimum(v.out[1], int64_t{2}) * v.out[2])) <= l2_bytes() * 3 / 4;
  }

  const PaddedImage image;  // any product's: they are alike
};

// The pieces of all k blocks.
template <class Block>
class PieceTable {
 public:
  PieceTable(const PaddedImage& image, const GemmPlan<Block>& plan, int64_t k_tiles)
      : most_(plan.k_block_tiles + minimum(image.runs(), plan.k_block_tiles * Block::kTileK)),
        pieces_(static_cast<size_t>(plan.k_blocks * most_) * sizeof(Piece)),
        counts_(static_cast<size_t>(plan.k_blocks) * sizeof(int64_t)) {
    for (int64_t kb = 0; kb < plan.k_blocks; ++kb) {
      auto* pieces = pieces_.as<Piece>() + kb * most_;
      counts_.as<int64_t>()[kb] = image.make_pieces<Block>(kb * plan.k_block_tiles, plan.tiles_of(kb, k_tiles), pieces);
    }
  }
  int64_t block_bytes() const { return most_ * static_cast<int64_t>(sizeof(Piece)); }
  PaddedImage::Pieces pieces(Piece* needed) const {
    return {pieces_.as<Piece>(), counts_.as<int64_t>(), most_, needed};
  }

 private:
  int64_t most_;
  Scratch pieces_, counts_;
};

template <class Block>
void compute_padded(const GemmCall& gemm, PaddedImage image, const PaddedPlan<Block>& padded,
                    const GemmPlan<Block>& plan, EpilogueFn* epilogue, Range blocks, Range panels,
                    int64_t weights_end) {
  const auto lines_of = [&](int64_t begin, int64_t end) {
    return image.lines_under(plan.first_row(begin), plan.first_row(end));
  };
  // Weights that do not stay in L2 are read again for each chunk.
  const bool weights_stay = gemm.weight.panels * gemm.weight.panel_bytes <= plan.most_resident;
  const int64_t most_bytes = weights_stay ? l2_bytes() / 8 : l2_bytes() * 3 / 8;
  int64_t chunks = 1;
  while (chunks < blocks.size() &&
         padded.bytes(lines_of(blocks.begin, blocks.begin + ceil_div(blocks.size(), chunks))) > most_bytes) {
    ++chunks;
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const Range part = share(blocks.size(), chunks, chunk);
    const Range mine{blocks.begin + part.begin, blocks.begin + part.end};
    const PaddedImage::Lines lines = lines_of(mine.begin, mine.end);
    const Scratch copy(static_cast<size_t>(padded.bytes(lines)));
    image.copy<Block>(lines, copy.as<typename Block::A>());
    GemmThread<Block, PaddedImage>(gemm, image, plan, epilogue, 0).compute(mine, panels, weights_end);
  }
}

template <class Block>
void conv_padded(const ConvCall& call, const PaddedPlan<Block>& padded) {
  const GemmCall first = product_call(call, 0);
  const int64_t even_rows = RowBlocks(first.m, Block::kRows, true).block_rows;
  const int64_t block_rows = PaddedPlan<Block>::rows_of_block(call.input.out[2], even_rows);
  const GemmPlan<Block> plan(first, RowBlocks(first.m, block_rows, false), true);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  const PieceTable<Block> table(padded.image, plan, first.weight.k_tiles);
  each_part(call, plan, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels, int64_t weights_end) {
    PaddedImage image(product_input(call, product));
    const Scratch needed(static_cast<size_t>(table.block_bytes()));
    image.use(table.pieces(needed.as<Piece>()));
    compute_padded<Block>(gemm, image, padded, plan, epilogue, blocks, panels, weights_end);
  });
}

template <class Block>
void conv_padded_or_with_patches(const ConvCall& call) {
  const PaddedPlan<Block> padded(call);
  if (padded.chosen(call)) return conv_padded(call, padded);
  conv_with<Block>(call);
}

}  // namespace xopt::XOPT_ISA
