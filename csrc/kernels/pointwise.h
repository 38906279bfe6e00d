// A few steps of arithmetic, element by element, on tensors that are broadcast to one shape: the contract of the kernel
// "pointwise" (dtype f32, that of its arithmetic; the tensors have any of the three floating dtypes).
#pragma once

#include "tiles/types.h"

namespace xopt {

enum class PointwiseStep : uint8_t { add, sub, mul, div, abs, sqrt, exp, softplus, activation };

struct PointwiseCall {
  static constexpr int kDims = 8, kMostInputs = 8, kMostSteps = 24;

  struct Input {
    const void* data;
    DType dtype;
    int64_t stride[kDims];  // elements; 0: it has one value for all
  };
  struct Operand {
    enum class In : uint8_t { number, input, step };
    In in;
    uint8_t place;  // of the input, or of an earlier step
    float number;
  };
  struct Step {
    PointwiseStep how;
    Activation activation;
    Operand operands[2];  // of add, sub, mul and div; else the first
    float alpha, beta;
  };

  int input_count, step_count;
  Input inputs[kMostInputs];
  Step steps[kMostSteps];
  // From the outermost to the innermost in memory of `out`, which has nothing between its elements.
  int64_t size[kDims];
  DType out_dtype;
  void* out;  // of the last step
};

using PointwiseFn = void(const PointwiseCall& call);

}  // namespace xopt
