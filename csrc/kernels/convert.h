// Conversions between fp32, bf16 and fp16 of single values in plain integer arithmetic, so that a loop over them is
// vectorised for baseline x86-64. They round to nearest even, keep denormals whatever MXCSR says, and keep a NaN a NaN
// (quiet, with its sign and the upper part of its payload). Of internal linkage, so that a copy compiled for one ISA
// level is never linked into another.
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

static inline uint32_t f32_bits_from_bf16(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

static inline uint32_t f32_bits_from_f16(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFF) << 13;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t normal = magnitude + (112U << 23);
  const uint32_t special = magnitude + (224U << 23);
  // 0.5 + m * 2^-24 - 0.5 makes a denormal's value out of normal numbers only.
  const uint32_t denormal = float_bits(bits_float((126U << 23) + (bits & 0x3FF)) - 0.5F);
  const uint32_t finite = magnitude < (1U << 23) ? denormal : normal;
  return (magnitude >= (31U << 23) ? special : finite) | sign;
}

static inline uint16_t bf16_from_f32_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

static inline uint16_t f16_from_f32_bits(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = (magnitude - (112U << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 pushes the bits below 2^-24 out of the mantissa, rounded to nearest even by the addition itself.
  const uint32_t denormal = float_bits(bits_float(magnitude) + 0.5F) - (126U << 23);
  const uint32_t special = magnitude > 0x7F800000 ? (0x7E00 | ((magnitude >> 13) & 0x3FF)) : 0x7C00;
  const uint32_t finite = magnitude < (113U << 23) ? denormal : normal;
  return static_cast<uint16_t>(sign | (magnitude >= (143U << 23) ? special : finite));
}

}  // namespace xopt
