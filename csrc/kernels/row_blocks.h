// How a product's rows are cut into blocks.
#pragma once

#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

struct RowBlocks {
  // Blocks of `most` rows, and a last one of what is left. If `even`, none has two rows more than another: a block of one
  // row takes as long as one of four, since its sums wait for each other, and 197 rows are 14 blocks of 14 and one more.
  RowBlocks(int64_t row_count, int64_t most, bool even)
      : rows(row_count),
        block_rows(most),
        row_blocks(ceil_div(row_count, most)),
        whole_blocks(row_blocks),
        blocks_of_line(maximum<int64_t>(1, row_blocks)),
        line_rows(row_count) {
    if (!even || rows == 0) return;
    block_rows = ceil_div(rows, row_blocks);
    whole_blocks = rows - (block_rows - 1) * row_blocks;
  }
  // Of lines of so many rows, each cut evenly for itself.
  static RowBlocks of_lines(int64_t row_count, int64_t line_rows, int64_t most) {
    RowBlocks blocks(line_rows, most, true);
    blocks.rows = row_count;
    blocks.row_blocks = row_count / line_rows * blocks.blocks_of_line;
    return blocks;
  }

  // Also of the block behind the last.
  int64_t first_row(int64_t block) const {
    const int64_t line = blocks_of_line == row_blocks ? 0 : block / blocks_of_line;
    const int64_t in_line = block - line * blocks_of_line;
    return minimum(rows, line * line_rows + in_line * block_rows - maximum<int64_t>(0, in_line - whole_blocks));
  }
  int64_t rows_of(int64_t block) const { return first_row(block + 1) - first_row(block); }
  int64_t least_rows() const { return whole_blocks < blocks_of_line ? block_rows - 1 : block_rows; }

  int64_t rows;
  int64_t block_rows, row_blocks;
  int64_t whole_blocks;  // of a line: of block_rows rows; those behind them have one row less, or are the last
  int64_t blocks_of_line, line_rows;  // without lines, those of all rows
};

}  // namespace xopt::XOPT_ISA
