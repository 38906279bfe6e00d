// Convolutions to small images under a stride, with weights that L2 does not hold, at level `amx`: products of patches whose
// k goes by slices (gemm_slices.h).
//
// Of a raster under a stride more than half of all rows are no outputs, and of longer sums through patches rows come in from
// L3 for each chunk of panels. Patches are copied for all threads, twice or three times a pixel under a 3 x 3 kernel.
#pragma once

#include "kernels/conv_loop.h"
#include "kernels/slice_loop.h"
#include "tiles/patches.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// Asked of an image, however many there are: results of a few of them have to be those of all.
inline bool conv_slices_pay(const ConvCall& call) {
  constexpr int64_t kMostPositions = 64;
  const PatchesView& v = call.input;
  const PackedWeight& w = call.weight;
  if (call.products != 1 || v.channel_stride != 1 || w.k_tiles == 0) return false;
  if (call.tuning.path != TunedPath::automatic) return false;
  if (call.tuning.weights_stay != TunedStay::automatic) return call.tuning.weights_stay == TunedStay::never;
  const bool strides = overlaps(v) && v.stride[0] * v.stride[1] * v.stride[2] > 1;
  return strides && output_positions(v) <= kMostPositions && w.panels * w.panel_bytes >= 2 * l2_bytes();
}

// Whether it was done.
template <class Kind>
bool conv_by_slices(const ConvCall& call) {
  using Block = SliceBlock<Kind>;
  if (!conv_slices_pay(call)) return false;
  const GemmCall product = product_call(call, 0);
  if (product.m > 0) SliceLoop<Block, Patches>(product, Patches(product_input(call, 0))).run(select_epilogue<Block>);
  return true;
}

}  // namespace xopt::XOPT_ISA
#endif
