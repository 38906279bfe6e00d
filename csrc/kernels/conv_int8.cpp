// Convolutions with weights of s8 and activations of u8 or s8, int32 sums. See conv.h.
// isa: scalar avx2 avx512 avx512_vnni amx
#include "kernels/conv_loop.h"
#include "kernels/conv_raster.h"
#include "kernels/conv_slices.h"
#include "tiles/block_amx.h"
#include "tiles/block_int8.h"

namespace xopt::XOPT_ISA {
namespace {

template <class Source>
void conv_int8(const ConvCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  if (conv_by_slices<TileInt8<Source>>(call)) return;
  using Block = TileBlock<TileInt8<Source>, kLongTiles>;
  const RasterPlan<Block> plan(call);
  if (plan.chosen(call, product_call(call, 0).weight.panels)) return conv_on_raster(call, plan);
  if (call.weight.k_tiles <= kShortTiles) return conv_with<TileBlock<TileInt8<Source>, kShortTiles>>(call);
  conv_with<Block>(call);
#else
  conv_with<Int8Vectors<Source>>(call);
#endif
}

void conv_s8s8(const ConvCall& call) { conv_int8<int8_t>(call); }
void conv_u8s8(const ConvCall& call) { conv_int8<uint8_t>(call); }

}  // namespace

XOPT_REGISTER_KERNEL(conv, s8s8, conv_s8s8);
XOPT_REGISTER_KERNEL(conv, u8s8, conv_u8s8);

}  // namespace xopt::XOPT_ISA
