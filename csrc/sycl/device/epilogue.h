// What happens to finished sums on a device: the epilogue of kernels/gemm.h, for one column of the output at a time.
#pragma once

#include <type_traits>

#include "kernels/gemm.h"
#include "sycl/device/values.h"

namespace xopt::device {

// One column of the output: what its rows have in common, and the way of a sum through it.
template <bool kIsInteger>
struct Column {
  using Sum = std::conditional_t<kIsInteger, int32_t, float>;

  Column(const GemmCall& call, int64_t panel, int column)
      : e(call.epilogue), weight(call.weight), packed(panel * kPanelColumns + column) {
    const int64_t width = weight.gated ? kTileColumns : kPanelColumns;
    out = panel * width + column;
    exists = column < width && out < weight.n;
    if (!exists) return;
    bias = load_column(e.bias, out, 0.0F);
    up_bias = load_column(e.up_bias, out, 0.0F);
    scale = kIsInteger ? weight.scale[packed] : load_column(e.scale, out, 1.0F);
  }

  float real(Sum sum, int64_t row, int32_t row_sum) const {
    if constexpr (!kIsInteger) return sum * scale + bias;
    auto acc = static_cast<uint32_t>(sum);
    uint32_t zero = 0;
    if (e.row_zero_point != nullptr) {
      zero = static_cast<uint32_t>(e.row_zero_point[e.row_zero_point_per_row ? row : 0]);
      acc -= zero * static_cast<uint32_t>(weight.column_sum[packed]);
    }
    if (weight.zero_point != nullptr) {
      const uint32_t rest = static_cast<uint32_t>(row_sum) - static_cast<uint32_t>(weight.k) * zero;
      acc -= rest * static_cast<uint32_t>(weight.zero_point[packed]);
    }
    const float row_scale = e.row_scale[e.row_scale_per_row ? row : 0];
    return static_cast<float>(static_cast<int32_t>(acc)) * (row_scale * scale) + bias;
  }

  float combined(float x, int64_t row_offset) const {
    if (e.binary == Binary::none) return x;
    const float other = load_float(e.other, e.other_dtype, row_offset + out);
    return e.binary == Binary::add ? x + other : x * other;
  }

  void store(const Sum* sums, int64_t row, int32_t row_sum, int64_t out_offset, int64_t other_offset) const {
    float x = real(sums[0], row, row_sum);
    if (weight.gated) {
      x = activate(e.activation, e.alpha, e.beta, x) * (static_cast<float>(sums[kTileColumns]) + up_bias);
    } else if (e.activation_last) {
      x = activate(e.activation, e.alpha, e.beta, combined(x, other_offset));
    } else {
      x = combined(activate(e.activation, e.alpha, e.beta, x), other_offset);
    }
    store_output(e, out_offset + out, x);
  }

  const Epilogue& e;
  const PackedWeight& weight;
  int64_t packed, out;
  bool exists;
  float bias = 0.0F, up_bias = 0.0F, scale = 1.0F;
};

inline int64_t position_offset(const OutPositions& positions, int64_t row) {
  int64_t offset = 0;
  for (int i = 2; i >= 0; --i) {
    offset += row % positions.size[i] * positions.stride[i];
    row /= positions.size[i];
  }
  return offset + row * positions.image_stride;
}

}  // namespace xopt::device
