// Conversions between fp32, bf16 and fp16 of single values in plain integer arithmetic, so that a loop over them is
// vectorised for baseline x86-64: no branches, signed comparisons, and 16-bit results left in 32 bits. They round to
// nearest even, keep denormals whatever MXCSR says, and keep a NaN a NaN (quiet, with its sign and the upper part of
// its payload). Of internal linkage, so that a copy compiled for one ISA level is never linked into another.
#pragma once

#include <cstdint>
#include <cstring>

namespace xopt {

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// All ones where a > b; for values below 2^31.
static inline uint32_t greater_mask(uint32_t a, uint32_t b) {
  return 0U - static_cast<uint32_t>(static_cast<int32_t>(a) > static_cast<int32_t>(b));
}

static inline uint32_t select(uint32_t mask, uint32_t if_set, uint32_t if_clear) {
  return (if_set & mask) | (if_clear & ~mask);
}

static inline uint32_t f32_bits_from_bf16(uint32_t bits) { return bits << 16; }

static inline uint32_t f32_bits_from_f16(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7FFF) << 13;
  const uint32_t normal = magnitude + (112U << 23);
  const uint32_t special = magnitude + (224U << 23);
  // 0.5 + m * 2^-24 - 0.5 makes a denormal's value out of normal numbers only.
  const uint32_t denormal = float_bits(bits_float((126U << 23) + (bits & 0x3FF)) - 0.5F);
  const uint32_t finite = select(greater_mask(1U << 23, magnitude), denormal, normal);
  return select(greater_mask(magnitude, (31U << 23) - 1), special, finite) | (bits & 0x8000) << 16;
}

static inline uint32_t bf16_from_f32_bits(uint32_t bits) {
  const uint32_t upper = bits >> 16;
  const uint32_t rounded = (bits + 0x7FFF + (upper & 1)) >> 16;
  return select(greater_mask(bits & 0x7FFFFFFF, 0x7F800000), upper | 0x40, rounded);
}

static inline uint32_t f16_from_f32_bits(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - (112U << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 pushes the bits below 2^-24 out of the mantissa, rounded to nearest even by the addition itself.
  const uint32_t denormal = float_bits(bits_float(magnitude) + 0.5F) - (126U << 23);
  const uint32_t nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  const uint32_t special = select(greater_mask(magnitude, 0x7F800000), nan, 0x7C00);
  const uint32_t finite = select(greater_mask(113U << 23, magnitude), denormal, normal);
  return select(greater_mask(magnitude, (143U << 23) - 1), special, finite) | ((bits >> 16) & 0x8000);
}

}  // namespace xopt
