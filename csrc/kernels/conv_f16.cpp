// Convolutions with weights of fp16, computed in fp32. See conv.h and conv_loop.h.
// isa: scalar avx2 avx512
#include "kernels/conv_image.h"
#include "kernels/float_blocks.h"

namespace xopt::XOPT_ISA {
namespace {

void conv_f16(const ConvCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  conv_from_image_or_patches<FmaBlock<WeightF16>>(call);
#else
  conv_with<ScalarBlock<F16, float, float, F16>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(conv, f16, conv_f16);

}  // namespace xopt::XOPT_ISA
