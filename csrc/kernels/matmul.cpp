// Products of pairs of matrices. See matmul.h and matmul_loop.h.
// isa: scalar avx2 avx512 avx512_bf16 amx
//
// In fp32, whatever the matrices hold, so that one loop is compiled for all; bf16 by pair products from AVX512-BF16 on, and by
// tiles with AMX.
#include "kernels/float_blocks.h"
#include "kernels/matmul_loop.h"

namespace xopt::XOPT_ISA {
namespace {

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16

void matmul_bf16(const MatmulCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AMX
  // A few rows are packed for longer than they are multiplied.
  if (call.m > 4) {
    const bool is_short = call.k <= kShortTiles * packed_tile_k(DType::bf16);
    if (is_short) return matmul_with<TileBlock<TileBf16, kShortTiles>, Bf16, DType::bf16>(call, DType::bf16);
    return matmul_with<TileBlock<TileBf16, kLongTiles>, Bf16, DType::bf16>(call, DType::bf16);
  }
#endif
  matmul_with<FmaBlock<WeightPairs>, Bf16, DType::bf16>(call, DType::bf16);
}

#else

#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
using Block = FmaBlock<WeightF32>;
#else
using Block = ScalarBlock<float, float, float, float>;
#endif

void matmul_f32(const MatmulCall& call) { matmul_with<Block, float, DType::f32>(call, DType::f32); }
void matmul_bf16(const MatmulCall& call) { matmul_with<Block, Bf16, DType::f32>(call, DType::bf16); }
void matmul_f16(const MatmulCall& call) { matmul_with<Block, F16, DType::f32>(call, DType::f16); }

#endif

}  // namespace

#if XOPT_LEVEL < XOPT_LEVEL_AVX512_BF16
XOPT_REGISTER_KERNEL(matmul, f32, matmul_f32);
XOPT_REGISTER_KERNEL(matmul, f16, matmul_f16);
#endif
XOPT_REGISTER_KERNEL(matmul, bf16, matmul_bf16);

}  // namespace xopt::XOPT_ISA
