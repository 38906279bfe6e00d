// GEMM with weights of fp16, computed in fp32 (fp16 sums would lose what fp16 inputs hold). See gemm.h.
// isa: scalar avx2 avx512
#include "kernels/float_blocks.h"
#include "kernels/gemm_loop.h"

namespace xopt::XOPT_ISA {
namespace {

void gemm_f16(const GemmCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  gemm_with<FmaBlock<WeightF16>>(call);
#else
  gemm_with<ScalarBlock<F16, float, float, F16>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(gemm, f16, gemm_f16);

}  // namespace xopt::XOPT_ISA
