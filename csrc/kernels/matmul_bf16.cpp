// Products of pairs of bf16 matrices: in fp32 up to AVX-512, by pair products from AVX512-BF16 on, by tiles with AMX.
// See matmul.h and matmul_loop.h.
// isa: scalar avx2 avx512 avx512_bf16 amx
#include "kernels/matmul_loop.h"
#include "tiles/block_amx.h"
#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

namespace xopt::XOPT_ISA {
namespace {

void matmul_bf16(const MatmulCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  // A few rows are packed for longer than they are multiplied.
  if (call.m > 4) {
    const bool is_short = call.k <= kShortTiles * packed_tile_k(DType::bf16);
    if (is_short) return matmul_with<TileBlock<TileBf16, kShortTiles>, Bf16, DType::bf16>(call, DType::bf16);
    return matmul_with<TileBlock<TileBf16, kLongTiles>, Bf16, DType::bf16>(call, DType::bf16);
  }
#endif
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  matmul_with<FmaBlock<WeightPairs>, Bf16, DType::bf16>(call, DType::bf16);
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
  matmul_with<FmaBlock<WeightF32>, Bf16, DType::f32>(call, DType::bf16);
#else
  matmul_with<ScalarBlock<float, float, float, float>, Bf16, DType::f32>(call, DType::bf16);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(matmul, bf16, matmul_bf16);

}  // namespace xopt::XOPT_ISA
