// Interleaved rotation of a vector: columns 2i and 2i + 1 are the two coordinates of a pair.
#pragma once

#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// x * cos -+ (the pair's other coordinate) * sin, from column `i` of a row on.
template <class T>
XOPT_INLINE F turn_pairs(const T* x, const float* cos, const float* sin, int64_t i, int64_t count) {
  const F c = load_first(cos + i, count), s = load_first(sin + i, count);
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  const F own = load_first(x + i, count);
  return _mm512_fmaddsub_ps(own, c, mul(_mm512_permute_ps(own, 0xb1), s));
#elif XOPT_LEVEL == XOPT_LEVEL_AVX2
  const F own = load_first(x + i, count);
  return _mm256_fmaddsub_ps(own, c, mul(_mm256_permute_ps(own, 0xb1), s));
#else
  const F own = mul(load(x + i), c), other = mul(load(x + (i ^ 1)), s);
  return i % 2 == 0 ? sub(own, other) : add(own, other);
#endif
}

}  // namespace xopt::XOPT_ISA
