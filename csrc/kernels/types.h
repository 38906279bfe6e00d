// The few types that cross the line between ops and kernels. No torch, no STL containers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xopt {

enum class DType : uint8_t { f32, bf16, f16, s8, u8, s32 };

constexpr int64_t dtype_size(DType dtype) {
  return dtype == DType::f32 || dtype == DType::s32 ? 4 : (dtype == DType::bf16 || dtype == DType::f16 ? 2 : 1);
}

enum class Activation : uint8_t {
  none,
  relu,
  gelu_erf,
  gelu_tanh,
  silu,
  sigmoid,
  tanh,
  hardswish,
  hardsigmoid,
  leaky_relu,  // alpha: the slope below zero
  clamp,       // alpha: lower bound, beta: upper bound
};

enum class Binary : uint8_t { none, add, mul };
enum class Norm : uint8_t { none, layer_norm, rms_norm };

}  // namespace xopt
