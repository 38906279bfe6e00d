// Blocks of sums in fp32 with weights of f16, for all kernels that have such. See float_blocks.h.
// isa: avx2 avx512
#include "kernels/float_blocks.h"

namespace xopt::XOPT_ISA {

XOPT_DEFINE_BLOCK(WeightF16)

}  // namespace xopt::XOPT_ISA
