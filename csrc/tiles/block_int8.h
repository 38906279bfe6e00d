// The block of int8 products on the vector ports, at each level. Source: u8 or s8, the dtype of A.
#pragma once

#include "tiles/block_avx2.h"
#include "tiles/block_avx512.h"
#include "tiles/block_scalar.h"

namespace xopt::XOPT_ISA {

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_VNNI
// VNNI multiplies u8 by s8 only, so s8 values of A become u8.
template <class Source>
using Int8Vectors = DotBlock<DotU8S8<Source, static_cast<Source>(-1) < static_cast<Source>(0) ? 128 : 0>>;
#elif XOPT_LEVEL >= XOPT_LEVEL_AVX2
template <class Source>
using Int8Vectors = Int8Block<Source>;
#else
template <class Source>
using Int8Vectors = ScalarBlock<int8_t, int16_t, int32_t, Source>;
#endif

}  // namespace xopt::XOPT_ISA
