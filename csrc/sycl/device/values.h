// Single values on a device: loaded from any dtype as floats, stored into any, and the activations on them. Conversions
// are those of kernels/convert.h, so that a device needs no arithmetic in bf16 or fp16 and rounds as the CPU does.
#pragma once

#include <sycl/builtins.hpp>

#include "kernels/convert.h"
#include "kernels/gemm.h"

namespace xopt::device {

inline float load_float(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[index];
  const uint32_t bits = static_cast<const uint16_t*>(data)[index];
  return bits_float(dtype == DType::bf16 ? f32_bits_from_bf16(bits) : f32_bits_from_f16(bits));
}

inline float load_column(const ColumnVector& vector, int64_t column, float absent) {
  return vector.data == nullptr ? absent : load_float(vector.data, vector.dtype, column);
}

// Rounded to what `dtype` holds, as a float.
inline float rounded(float value, DType dtype) {
  if (dtype == DType::f32) return value;
  const uint32_t bits = float_bits(value);
  return bits_float(dtype == DType::bf16 ? f32_bits_from_bf16(bf16_from_f32_bits(bits))
                                         : f32_bits_from_f16(f16_from_f32_bits(bits)));
}

// Rounded to nearest even and clamped, where `dtype` is s8 or u8; a NaN becomes the lowest.
inline int32_t rounded_integer(float value, DType dtype) {
  const float lowest = dtype == DType::s8 ? -128.0F : 0.0F;
  const float highest = lowest + 255.0F;
  value = value > lowest ? value : lowest;
  return static_cast<int32_t>(sycl::rint(value < highest ? value : highest));
}

inline void store_float(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::bf16) {
    static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bf16_from_f32_bits(float_bits(value)));
  } else if (dtype == DType::f16) {
    static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(f16_from_f32_bits(float_bits(value)));
  } else {
    static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(rounded_integer(value, dtype));
  }
}

// The output of an epilogue: int8 is rounded before the zero point is added, since it is the stored value that is even.
inline void store_output(const Epilogue& e, int64_t index, float value) {
  if (e.out_dtype == DType::s8 || e.out_dtype == DType::u8) {
    value = sycl::rint(value / e.out_scale) + static_cast<float>(e.out_zero_point);
  }
  store_float(e.out, e.out_dtype, index, value);
}

// ---- Activations ---------------------------------------------------------------------------------------------------

inline float sigmoid(float x) { return 1.0F / (1.0F + sycl::exp(-x)); }

// Zero where the gate is: an infinity times zero would be none.
inline float gated_by(float x, float gate) { return gate == 0.0F ? 0.0F : x * gate; }

inline float normal_distribution(float x) { return 0.5F + 0.5F * sycl::erf(x * 0.70710678F); }

inline float activate(Activation activation, float alpha, float beta, float x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x < 0.0F ? 0.0F : x;
    case Activation::gelu_erf:
      return gated_by(x, normal_distribution(x));
    case Activation::gelu_tanh:
      return gated_by(x, sigmoid(1.5957691F * (x + 0.044715F * x * x * x)));
    case Activation::silu:
      return gated_by(x, sigmoid(x));
    case Activation::sigmoid:
      return sigmoid(x);
    case Activation::tanh:
      return sycl::tanh(x);
    case Activation::hardswish: {
      const float gate = x + 3.0F;
      return x * (gate < 0.0F ? 0.0F : gate > 6.0F ? 6.0F : gate) / 6.0F;
    }
    case Activation::hardsigmoid: {
      const float gate = x + 3.0F;
      return (gate < 0.0F ? 0.0F : gate > 6.0F ? 6.0F : gate) / 6.0F;
    }
    case Activation::quick_gelu:
      return gated_by(x, sigmoid(1.702F * x));
    case Activation::leaky_relu:
      return x < 0.0F ? alpha * x : x;
    case Activation::clamp: {
      const float above = x < alpha ? alpha : x;
      return above > beta ? beta : above;
    }
  }
  return x;
}

}  // namespace xopt::device
