// Blocks of sums in fp32 with weights of bf16, for all kernels that have such. See float_blocks.h.
// isa: avx2 avx512 avx512_bf16 amx
#include "kernels/float_blocks.h"

namespace xopt::XOPT_ISA {

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
XOPT_DEFINE_BLOCK(WeightPairs)
#else
XOPT_DEFINE_BLOCK(WeightBf16)
#endif

}  // namespace xopt::XOPT_ISA
