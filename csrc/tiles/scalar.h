// The vector vocabulary at level `scalar`: a vector of one float. Slow and plainly right.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tiles/halves.h"

namespace xopt::XOPT_ISA {

using F = float;
inline constexpr int kWidth = 1;

XOPT_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
XOPT_INLINE float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

XOPT_INLINE F set1(float x) { return x; }
XOPT_INLINE F add(F a, F b) { return a + b; }
XOPT_INLINE F sub(F a, F b) { return a - b; }
XOPT_INLINE F mul(F a, F b) { return a * b; }
XOPT_INLINE F div(F a, F b) { return a / b; }
// 1 / a, for a and the result normal.
XOPT_INLINE F reciprocal(F a) { return div(set1(1.0F), a); }
XOPT_INLINE F fma(F a, F b, F c) { return a * b + c; }
// As x86 has it: the second operand if either is NaN. Clamps keep NaN by passing the value second.
XOPT_INLINE F min(F a, F b) { return a < b ? a : b; }
XOPT_INLINE F max(F a, F b) { return a > b ? a : b; }
XOPT_INLINE F abs(F a) { return bits_float(float_bits(a) & 0x7fffffffU); }
XOPT_INLINE F copy_sign(F magnitude, F sign) {
  return bits_float((float_bits(magnitude) & 0x7fffffffU) | (float_bits(sign) & 0x80000000U));
}
// a < b ? x : y
XOPT_INLINE F select_less(F a, F b, F x, F y) { return a < b ? x : y; }
// x * 2^n for n integral and the result normal or zero.
XOPT_INLINE F scale_exponent(F x, F n) { return std::ldexp(x, n == n ? static_cast<int>(n) : 0); }
XOPT_INLINE F round_even(F a) { return std::nearbyint(a); }
// What is above the next lower whole number, and x times 2 to the power of that number.
XOPT_INLINE F fraction(F a) { return a - std::floor(a); }
XOPT_INLINE F scale_by_floor(F x, F n) { return scale_exponent(x, std::floor(n)); }
XOPT_INLINE F sqrt(F a) { return std::sqrt(a); }
XOPT_INLINE float reduce_add(F a) { return a; }

XOPT_INLINE F load(const float* p) { return *p; }
XOPT_INLINE F load(const int32_t* p) { return static_cast<float>(*p); }
XOPT_INLINE F load(const int8_t* p) { return static_cast<float>(*p); }
XOPT_INLINE F load(const uint8_t* p) { return static_cast<float>(*p); }
XOPT_INLINE F load(const Bf16* p) { return bits_float(static_cast<uint32_t>(p->bits) << 16); }
XOPT_INLINE F load(const F16* p) {
  const uint32_t sign = (p->bits & 0x8000U) << 16;
  const uint32_t exponent = (p->bits >> 10) & 31U;
  const uint32_t mantissa = p->bits & 1023U;
  if (exponent == 31) return bits_float(sign | 0x7f800000U | (mantissa << 13));
  if (exponent == 0) return copy_sign(static_cast<float>(mantissa) * 5.9604644775390625e-8F, bits_float(sign));
  return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Integers wrap around, as the vector instructions do.
using I = uint32_t;
XOPT_INLINE F take_lanes(F x, I) { return x; }
XOPT_INLINE I set1_int(int32_t x) { return static_cast<uint32_t>(x); }
XOPT_INLINE I load_int(const int32_t* p) { return static_cast<uint32_t>(*p); }
XOPT_INLINE I add_int(I a, I b) { return a + b; }
XOPT_INLINE I sub_int(I a, I b) { return a - b; }
XOPT_INLINE I mul_int(I a, I b) { return a * b; }
XOPT_INLINE void store_int(int32_t* p, I x) { *p = static_cast<int32_t>(x); }
XOPT_INLINE F to_float(I a) { return static_cast<float>(static_cast<int32_t>(a)); }

XOPT_INLINE void store(float* p, F x) { *p = x; }
XOPT_INLINE void store(Bf16* p, F x) {
  const uint32_t bits = float_bits(x);
  const bool nan = x != x;
  p->bits = nan ? static_cast<uint16_t>((bits >> 16) | 0x40U)
                : static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
XOPT_INLINE void store(F16* p, F x) {
  const uint32_t bits = float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t half;
  if (magnitude > 0x7f800000U) {
    half = 0x7e00U | ((magnitude >> 13) & 1023U);
  } else if (magnitude >= 0x477ff000U) {
    half = 0x7c00U;  // rounds to 65536 or more
  } else if (magnitude < 0x38800000U) {
    // Adding 0.5 puts the last place of a float at that of a subnormal half, so the addition rounds to even.
    half = float_bits(bits_float(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    half = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  p->bits = static_cast<uint16_t>(sign | half);
}
// Rounded to nearest even and saturated; NaN becomes 0 plus the zero point's share that x already holds.
XOPT_INLINE void store(int8_t* p, F x) {
  const F y = x != x ? 0.0F : min(max(x, -128.0F), 127.0F);
  *p = static_cast<int8_t>(round_even(y));
}
XOPT_INLINE void store(uint8_t* p, F x) {
  const F y = x != x ? 0.0F : min(max(x, 0.0F), 255.0F);
  *p = static_cast<uint8_t>(round_even(y));
}

}  // namespace xopt::XOPT_ISA
