// The activations of tiles/types.h, for kernels that have an instance for each.
#pragma once

#define XOPT_EACH_ACTIVATION(USE) \
  USE(none)                       \
  XOPT_EACH_FUNCTION(USE)

// Without that which changes nothing.
#define XOPT_EACH_FUNCTION(USE) \
  USE(relu)                     \
  USE(gelu_erf)                 \
  USE(gelu_tanh)                \
  USE(silu)                     \
  USE(sigmoid)                  \
  USE(tanh)                     \
  USE(hardswish)                \
  USE(hardsigmoid)              \
  USE(quick_gelu)               \
  USE(leaky_relu)               \
  USE(clamp)
