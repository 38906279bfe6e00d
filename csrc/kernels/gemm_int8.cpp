// GEMM with weights of s8 and activations of u8 or s8, int32 sums. See gemm.h.
// isa: scalar avx2 avx512 avx512_vnni amx
#include "kernels/gemm_loop.h"
#include "tiles/block_amx.h"
#include "tiles/block_int8.h"

namespace xopt::XOPT_ISA {
namespace {

template <class Source>
void gemm_int8(const GemmCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  if (call.m > 4) return gemm_with_tiles<TileInt8<Source>>(call);
#endif
  gemm_with<Int8Vectors<Source>>(call);
}

void gemm_s8s8(const GemmCall& call) { gemm_int8<int8_t>(call); }
void gemm_u8s8(const GemmCall& call) { gemm_int8<uint8_t>(call); }

}  // namespace

XOPT_REGISTER_KERNEL(gemm, s8s8, gemm_s8s8);
XOPT_REGISTER_KERNEL(gemm, u8s8, gemm_u8s8);

}  // namespace xopt::XOPT_ISA
