// GEMM with weights of bf16: in fp32 up to AVX-512, by pair products from AVX512-BF16 on, by tiles with AMX.
// isa: scalar avx2 avx512 avx512_bf16 amx
#include "kernels/float_blocks.h"
#include "kernels/gemm_loop.h"

namespace xopt::XOPT_ISA {
namespace {

void gemm_bf16(const GemmCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  // One or two rows are as fast as their weights come in. Of four, the pair products take longer than that: 768 x 3072
  // took 250 us (19 GB/s on two cores) where sixteen rows took 130 in a tile.
  if (call.m > 2) return gemm_with_tiles<TileBf16>(call);
#endif
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  gemm_with<FmaBlock<WeightPairs>>(call);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
  gemm_with<FmaBlock<WeightBf16>>(call);
#else
  gemm_with<ScalarBlock<Bf16, float, float, Bf16>>(call);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(gemm, bf16, gemm_bf16);

}  // namespace xopt::XOPT_ISA
