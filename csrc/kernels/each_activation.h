// The activations of tiles/types.h, for kernels that have an instance for each.
#pragma once

#define XOPT_EACH_ACTIVATION(USE) \
  USE(none)                       \
  USE(relu)                       \
  USE(gelu_erf)                   \
  USE(gelu_tanh)                  \
  USE(silu)                       \
  USE(sigmoid)                    \
  USE(tanh)                       \
  USE(hardswish)                  \
  USE(hardsigmoid)                \
  USE(quick_gelu)                 \
  USE(leaky_relu)                 \
  USE(clamp)
