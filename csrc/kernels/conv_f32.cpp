// Convolutions with weights of fp32. See conv.h and conv_loop.h.
// isa: scalar avx2 avx512
#include "kernels/conv_image.h"
#include "kernels/float_blocks.h"
#include "kernels/narrow_groups.h"

namespace xopt::XOPT_ISA {
namespace {

void conv_f32(const ConvCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  if (!conv_narrow(call)) conv_from_image_or_patches<FmaBlock<WeightF32>>(call);
#else
  conv_with<ScalarBlock<float, float, float, float>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(conv, f32, conv_f32);

}  // namespace xopt::XOPT_ISA
