// How a product's rows are cut into blocks.
#pragma once

#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

struct RowBlocks {
  // Blocks of `most` rows, and a last one of what is left. If `even`, none has two rows more than another: a block of one
  // row takes as long as one of four, since its sums wait for each other, and 197 rows are 14 blocks of 14 and one more.
  RowBlocks(int64_t row_count, int64_t most, bool even)
      : rows(row_count), block_rows(most), row_blocks(ceil_div(row_count, most)), whole_blocks(row_blocks) {
    if (!even || rows == 0) return;
    block_rows = ceil_div(rows, row_blocks);
    whole_blocks = rows - (block_rows - 1) * row_blocks;
  }

  // Also of the block behind the last.
  int64_t first_row(int64_t block) const {
    return minimum(rows, block * block_rows - maximum<int64_t>(0, block - whole_blocks));
  }
  int64_t rows_of(int64_t block) const { return first_row(block + 1) - first_row(block); }

  int64_t rows;
  int64_t block_rows, row_blocks;
  int64_t whole_blocks;  // of block_rows rows; those behind them have one row less, or are the last
};

}  // namespace xopt::XOPT_ISA
