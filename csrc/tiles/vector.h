// Vectors of floats (type F, kWidth of them) at the level of this compilation, and what can be said of them without
// naming a level: partial loads and stores.
#pragma once

#include "tiles/level.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
#include "tiles/avx512.h"
#elif XOPT_LEVEL == XOPT_LEVEL_AVX2
#include "tiles/avx2.h"
#else
#include "tiles/scalar.h"
#endif

namespace xopt::XOPT_ISA {

// Parts of a vector, by a detour through the stack where a level has nothing better for the type.
template <class T>
XOPT_INLINE F load_part(const T* p, int64_t n) {
  T buffer[kWidth] = {};
  for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(buffer);
}
template <class T>
XOPT_INLINE void store_part(T* p, F x, int64_t n) {
  T buffer[kWidth];
  store(buffer, x);
  for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// The first n (0 < n <= kWidth) of a vector; never touches memory past them.
template <class T>
XOPT_INLINE F load_first(const T* p, int64_t n) {
  return n >= kWidth ? load(p) : load_part(p, n);
}
template <class T>
XOPT_INLINE void store_first(T* p, F x, int64_t n) {
  if (n >= kWidth) return store(p, x);
  store_part(p, x, n);
}

// Two vectors that follow each other. Levels have their own where they have something better.
template <class T>
XOPT_INLINE void store_two(T* p, F x, F y) {
  store(p, x);
  store(p + kWidth, y);
}

template <class T>
XOPT_INLINE F round_to(F x) {
  T buffer[kWidth];
  store(buffer, x);
  return load(buffer);
}

template <class T>
XOPT_INLINE T minimum(T a, T b) {
  return a < b ? a : b;
}
template <class T>
XOPT_INLINE T maximum(T a, T b) {
  return a > b ? a : b;
}

}  // namespace xopt::XOPT_ISA
