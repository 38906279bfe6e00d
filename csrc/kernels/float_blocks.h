// Blocks of sums in fp32, compiled once for all kernels of a level that multiply by them (float_blocks_*.cpp): where products,
// convolutions and pairs of matrices each compiled all row counts anew, that was a sixth of the whole build.
#pragma once

#include "kernels/gemm_background.h"
#include "tiles/block_amx.h"
#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

#define XOPT_DEFINE_BLOCK(WEIGHT) \
  template void FmaBlock<WEIGHT>::run<Prefetches>(int64_t rows, const BlockCall& call, Prefetches& between);
#define XOPT_DECLARE_BLOCK(WEIGHT) extern XOPT_DEFINE_BLOCK(WEIGHT)

namespace xopt::XOPT_ISA {

#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
// Not inline, or each kernel would compile it after all.
template <class Weight>
template <class Between>
void FmaBlock<Weight>::run(int64_t rows, const BlockCall& call, Between& between) {
  Rows<kRows>::run(rows, call, between);
}

XOPT_DECLARE_BLOCK(WeightF32)
XOPT_DECLARE_BLOCK(WeightBf16)
XOPT_DECLARE_BLOCK(WeightF16)
#endif
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
XOPT_DECLARE_BLOCK(WeightPairs)
#endif

}  // namespace xopt::XOPT_ISA
