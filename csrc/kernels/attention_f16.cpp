// Attention of f16 tensors. See attention.h and attention_loop.h.
// isa: scalar avx2 avx512
#include "kernels/attention_loop.h"
#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

namespace xopt::XOPT_ISA {
namespace {

void attention_f16(const AttentionCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  attention_with<FmaBlock<WeightF32>, F16>(call, DType::f16);
#else
  attention_with<ScalarBlock<float, float, float, float>, F16>(call, DType::f16);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(attention, f16, attention_f16);

}  // namespace xopt::XOPT_ISA
