// What happens to accumulators once their last product is in: the contract of the kernel "epilogue" (dtype
// f32 or s32, the accumulator's), which picks the routine for a call, and of the kernel "row_norm".
#pragma once

#include "kernels/gemm.h"

namespace xopt {

inline constexpr int64_t kMostStripPanels = 8;

// A strip: some rows of one or up to kMostStripPanels neighbouring panels, so that a row of the output is written in one
// go. `acc` holds rows of 32 sums (kPanelColumns apart) for each panel; an epilogue may use them up.
struct EpilogueStrip {
  void* acc;
  int64_t acc_panel_stride;  // elements from one panel's sums to the next's
  int64_t row;               // row of the output that the strip's first row is
  int64_t out_row;           // the same, as a row of epilogue.out (they differ where `out` is a scratch for a few rows)
  int64_t panel;             // the first panel
  int64_t column;            // output column of its column 0
  int64_t columns;           // how many of the output there are
  const float* bias;         // of the strip's packed columns, whole panels of them; zeros where there is none
  const float* scale;        // likewise, of sums of floats; nullptr where there is none
  const int32_t* row_sums;   // int8 weights with zero points: the sum of A's row, per row of the strip
  int32_t a_offset;          // int8: what was added to A's values on their way in
};

// Does rows [begin, end) of the strip, so that a kernel may spread the work over its multiplications.
using EpilogueFn = void(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end);
using SelectEpilogueFn = void(const GemmCall& call, EpilogueFn** chosen);

// Rows [begin, end) of `values` (f32, n apart) -> the norm -> epilogue.out, and the values to epilogue.sum if given.
// `first_row` is the output row of values' row 0.
using RowNormFn = void(const GemmCall& call, const float* values, int64_t first_row, int64_t begin, int64_t end);

}  // namespace xopt
