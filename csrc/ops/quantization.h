// Checks of scales and zero points: of an input, and of a weight's output columns.
#pragma once

#include <vector>

#include "ops/check.h"

namespace xopt::ops {

// Whether a parameter is one value for all; its place and dtype are checked.
inline bool is_single_parameter(const Checked& checked, DType dtype) {
  checked.in_place();
  checked.dtype({dtype});
  return checked.tensor.dims() <= 1 && checked.tensor.numel() == 1;
}

// One value for the whole input.
template <class Value>
const Value* input_parameter(const char* op, const char* name, const Tensor& tensor, DType dtype) {
  const Checked checked{op, name, tensor};
  if (!is_single_parameter(checked, dtype)) {
    checked.fail("expected shape [1], one value for the whole input, got ", tensor.shape_text());
  }
  return static_cast<const Value*>(tensor.data());
}

// A parameter of the weight's columns: [n], or [1] for all. Spread out to n values.
template <class Value>
std::vector<Value> column_parameter(const char* op, const char* name, const Tensor& tensor, DType dtype, int64_t n) {
  const Checked checked{op, name, tensor};
  const bool single = is_single_parameter(checked, dtype);
  if (!single) checked.shape({n});
  const auto* values = static_cast<const Value*>(tensor.data());
  const int64_t stride = single ? 0 : tensor.stride(0);
  std::vector<Value> spread(static_cast<size_t>(n));
  for (int64_t column = 0; column < n; ++column) spread[static_cast<size_t>(column)] = values[column * stride];
  return spread;
}

}  // namespace xopt::ops
