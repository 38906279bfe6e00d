// GEMM with weights of s8 and activations of u8 or s8, int32 sums. See gemm.h.
// isa: scalar avx2 avx512 avx512_vnni amx
#include "kernels/gemm_loop.h"
#include "tiles/block_amx.h"
#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

namespace xopt::XOPT_ISA {
namespace {

// Offset: what VNNI, which multiplies u8 by s8 only, must add to A.
template <class Source, int32_t Offset>
void gemm_int8(const GemmCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  if (call.m > 4) return gemm_with_tiles<TileInt8<Source>>(call);
#endif
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_VNNI
  gemm_with<DotBlock<DotU8S8<Source, Offset>>>(call);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
  gemm_with<Int8Block<Source>>(call);
#else
  gemm_with<ScalarBlock<int8_t, int16_t, int32_t, Source>>(call);
#endif
}

void gemm_s8s8(const GemmCall& call) { gemm_int8<int8_t, 128>(call); }
void gemm_u8s8(const GemmCall& call) { gemm_int8<uint8_t, 0>(call); }

}  // namespace

XOPT_REGISTER_KERNEL(gemm, s8s8, gemm_s8s8);
XOPT_REGISTER_KERNEL(gemm, u8s8, gemm_u8s8);

}  // namespace xopt::XOPT_ISA
