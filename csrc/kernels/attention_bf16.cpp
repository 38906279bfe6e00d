// Attention of bf16 tensors. See attention.h, attention_loop.h and attention_tiles.h.
// isa: scalar avx2 avx512 avx512_bf16 amx
#include "kernels/attention_loop.h"
#include "kernels/attention_tiles.h"
#include "kernels/float_blocks.h"

namespace xopt::XOPT_ISA {
namespace {

void attention_bf16(const AttentionCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  if (!few_rows_done<Bf16>(call)) attention_on_tiles(call);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  attention_with<FmaBlock<WeightPairs>, Bf16>(call, DType::bf16);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
  attention_with<FmaBlock<WeightF32>, Bf16>(call, DType::bf16);
#else
  attention_with<ScalarBlock<float, float, float, float>, Bf16>(call, DType::bf16);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(attention, bf16, attention_bf16);

}  // namespace xopt::XOPT_ISA
