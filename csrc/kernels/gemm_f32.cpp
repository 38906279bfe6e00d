// GEMM with weights of fp32. See gemm.h and gemm_loop.h.
// isa: scalar avx2 avx512
#include "kernels/float_blocks.h"
#include "kernels/gemm_loop.h"

namespace xopt::XOPT_ISA {
namespace {

void gemm_f32(const GemmCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  gemm_with<FmaBlock<WeightF32>>(call);
#else
  gemm_with<ScalarBlock<float, float, float, float>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(gemm, f32, gemm_f32);

}  // namespace xopt::XOPT_ISA
