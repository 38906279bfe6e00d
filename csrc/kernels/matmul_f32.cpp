// Products of pairs of f32 matrices. See matmul.h and matmul_loop.h.
// isa: scalar avx2 avx512
#include "kernels/matmul_loop.h"
#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

namespace xopt::XOPT_ISA {
namespace {

void matmul_f32(const MatmulCall& call) {
#if XOPT_LEVEL >= XOPT_LEVEL_AVX2
  matmul_with<FmaBlock<WeightF32>, float, DType::f32>(call, DType::f32);
#else
  matmul_with<ScalarBlock<float, float, float, float>, float, DType::f32>(call, DType::f32);
#endif
}

}  // namespace

XOPT_REGISTER_KERNEL(matmul, f32, matmul_f32);

}  // namespace xopt::XOPT_ISA
