// Convolutions with weights of bf16: in fp32 up to AVX-512, by pair products from AVX512-BF16 on, by tiles with AMX.
// isa: scalar avx2 avx512 avx512_bf16 amx
#include "kernels/conv_image.h"
#include "kernels/conv_lines.h"
#include "kernels/conv_slices.h"
#include "kernels/float_blocks.h"
#include "kernels/narrow_groups.h"

namespace xopt::XOPT_ISA {
namespace {

void conv_bf16(const ConvCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  // A tile of several groups with one channel each is zeros but for one row of each group's outputs.
  if (call.group_in == 1 && conv_narrow(call)) return;
  if (conv_by_slices<TileBf16>(call)) return;
  using Block = TileBlock<TileBf16, kLongTiles>;
  const RasterPlan<Block> plan(call);
  if (plan.chosen(call, product_call(call, 0).weight.panels)) return conv_on_raster(call, plan);
  if (lines_fit(call)) {
    const RasterPlan<Block> line_plan(call, true);
    if (lines_chosen(call, line_plan)) return conv_on_lines(call, line_plan);
  }
  if (call.weight.k_tiles <= kShortTiles) return conv_with<TileBlock<TileBf16, kShortTiles>>(call);
  conv_with<Block>(call);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  if (!conv_narrow(call)) conv_from_image_or_patches<FmaBlock<WeightPairs>>(call);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
  if (!conv_narrow(call)) conv_from_image_or_patches<FmaBlock<WeightBf16>>(call);
#else
  conv_with<ScalarBlock<Bf16, float, float, Bf16>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(conv, bf16, conv_bf16);

}  // namespace xopt::XOPT_ISA
