// The loops of a convolution: those of gemm_thread.h, with the view of patches, for each product of the groups.
#pragma once

#include "kernels/conv.h"
#include "kernels/gemm_loop.h"
#include "tiles/patches.h"
#include "tiles/pixels.h"

namespace xopt::XOPT_ISA {

// The product of some groups, as a call of its own.
inline GemmCall product_call(const ConvCall& call, int64_t product) {
  const int64_t packed_column = product * round_up(call.product_columns, kPanelColumns);
  return {call.images * output_positions(call.input),
          {},
          call.weight.columns(packed_column, call.product_columns),
          call.epilogue.from_column(product * call.product_columns),
          call.tuning};
}

inline PatchesView product_input(const ConvCall& call, int64_t product) {
  PatchesView input = call.input;
  input.data = static_cast<const uint8_t*>(input.data) + product * input.channels * dtype_size(input.dtype);
  return input;
}

// compute(product as a call, its number, row blocks, panels, the end of its part's panels) for all there are, by threads
// that share them.
template <class Block, class Compute>
void each_part(const ConvCall& call, const GemmPlan<Block>& plan, const Compute& compute) {
  // Products that are many keep the threads busy by themselves.
  constexpr int64_t kProductsOfAThread = 4;
  const bool whole = call.products >= kProductsOfAThread * plan.max_threads;
  const Grid grid(plan, product_call(call, 0).weight, call.products, whole ? 1 : plan.grid_rows,
                  whole ? 1 : plan.grid_panels);
  grid.each(plan.max_threads, [&](int64_t product, Range rows, Range panels, int64_t weights_end) {
    compute(product_call(call, product), product, rows, panels, weights_end);
  });
}

// Whether patches share pixels.
inline bool overlaps(const PatchesView& v) {
  return v.kernel[0] * v.kernel[1] * v.kernel[2] > v.stride[0] * v.stride[1] * v.stride[2];
}

// Whether patches would convert pixels, each once for each place of the kernel.
inline bool converts_often(const ConvCall& call) { return call.input.dtype != DType::bf16 && overlaps(call.input); }

// The call with its input in what Block multiplies, pixel after pixel, written to `to`.
template <class Block>
ConvCall converted(const ConvCall& call, typename Block::A* to) {
  ConvCall result = call;
  const PatchesView& from = call.input;
  PatchesView& view = result.input;
  const int64_t channels = call.products * from.channels, size = dtype_size(from.dtype);
  view.data = to;
  view.dtype = sizeof(*to) == 2 ? DType::bf16 : DType::f32;
  view.channel_stride = 1;
  view.in_stride[2] = channels;
  view.in_stride[1] = from.in[2] * channels;
  view.in_stride[0] = from.in[1] * view.in_stride[1];
  view.image_stride = from.in[0] * view.in_stride[0];
  PatchesView all = from;
  all.channels = channels;
  const int64_t lines = call.images * from.in[0] * from.in[1];
  parallel(static_cast<int>(minimum<int64_t>(lines, max_threads())), [&](int thread, int threads) {
    const Range mine = share(lines, threads, thread);
    for (int64_t line = mine.begin; line < mine.end; ++line) {
      const int64_t height = line % from.in[1], depth = line / from.in[1] % from.in[0];
      const int64_t image = line / from.in[1] / from.in[0];
      const int64_t first = image * from.image_stride + depth * from.in_stride[0] + height * from.in_stride[1];
      const auto* pixels = static_cast<const uint8_t*>(from.data) + first * size;
      copy_pixels<Block>(all, pixels, from.in[2], to + line * view.in_stride[1]);
    }
  });
  return result;
}

template <class Block>
void conv_with(const ConvCall& call) {
  if constexpr (!Block::kIsInt) {
    if (call.input.channel_stride != 1 || (sizeof(typename Block::A) == 2 && converts_often(call))) {
      const PatchesView& v = call.input;
      const int64_t elements = call.images * v.in[0] * v.in[1] * v.in[2] * call.products * v.channels;
      const Scratch input(static_cast<size_t>(elements) * sizeof(typename Block::A));
      return conv_with<Block>(converted<Block>(call, input.as<typename Block::A>()));
    }
  }
  const GemmCall first = product_call(call, 0);
  const GemmPlan<Block> plan(first);
  EpilogueFn* epilogue = select_epilogue<Block>(first);
  each_part(call, plan, [&](const GemmCall& gemm, int64_t product, Range blocks, Range panels, int64_t weights_end) {
    GemmThread<Block, Patches>(gemm, Patches(product_input(call, product)), plan, epilogue, 0)
        .compute(blocks, panels, weights_end);
  });
}

}  // namespace xopt::XOPT_ISA
