// The loops of a convolution: those of gemm_loop.h, with the view of patches, for each product of the groups.
#pragma once

#include "kernels/conv.h"
#include "kernels/gemm_loop.h"
#include "tiles/patches.h"

namespace xopt::XOPT_ISA {

inline ColumnVector columns_from(ColumnVector vector, int64_t first) {
  if (vector.data != nullptr) {
    vector.data = static_cast<const uint8_t*>(vector.data) + first * dtype_size(vector.dtype);
  }
  return vector;
}

// The product of some groups, as a call of its own.
inline GemmCall product_call(const ConvCall& call, int64_t product) {
  const int64_t column = product * call.product_columns;
  const int64_t packed_column = product * round_up(call.product_columns, kPanelColumns);
  Epilogue e = call.epilogue;
  e.scale = columns_from(e.scale, column);
  e.bias = columns_from(e.bias, column);
  if (e.other != nullptr) e.other = static_cast<const uint8_t*>(e.other) + column * dtype_size(e.other_dtype);
  e.out = static_cast<uint8_t*>(e.out) + column * dtype_size(e.out_dtype);
  return {call.images * output_positions(call.input), {}, call.weight.columns(packed_column, call.product_columns), e};
}

inline PatchesView product_input(const ConvCall& call, int64_t product) {
  PatchesView input = call.input;
  input.data = static_cast<const uint8_t*>(input.data) + product * input.channels * dtype_size(input.dtype);
  return input;
}

// Gives threads their parts: compute(product as a call, its number, row blocks, panels).
template <class Block, class Compute>
void each_part(const ConvCall& call, const GemmPlan<Block>& plan, const Compute& compute) {
  // Products that are many keep the threads busy by themselves.
  constexpr int64_t kProductsOfAThread = 4;
  const bool whole = call.products >= kProductsOfAThread * plan.max_threads;
  const int64_t rows = whole ? 1 : plan.grid_rows, panels = whole ? 1 : plan.grid_panels;
  const int64_t parts = call.products * rows * panels;
  parallel(static_cast<int>(minimum(parts, plan.max_threads)), [&](int thread, int threads) {
    const Range mine = share(parts, threads, thread);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t product = i / (rows * panels);
      const GemmCall gemm = product_call(call, product);
      compute(gemm, product, share(plan.row_blocks, rows, i / panels % rows),
              share(gemm.weight.panels, panels, i % panels));
    }
  });
}

template <class Block>
void conv_with(const ConvCall& call) {
  const GemmCall first = product_call(call, 0);
  const GemmPlan<Block> plan(first);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  each_part(call, plan, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels) {
    GemmThread<Block, Patches>(gemm, Patches(product_input(call, product)), plan, epilogue, 0).compute(blocks, panels);
  });
}

}  // namespace xopt::XOPT_ISA
