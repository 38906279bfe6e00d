// Single values of a weight of 8 or 4 bits (kernels/weight_only.h), as floats.
#pragma once

#include "kernels/weight_only.h"
#include "sycl/device/values.h"

namespace xopt::device {

// A packed column of one group: what all its values there have in common.
struct CodedColumn {
  // `column`: counted over all panels; `k`: of the group, from which on values are asked for.
  CodedColumn(const CodedWeight& coded, int64_t column, int64_t k) : weight(coded) {
    const int64_t tile = column % kPanelColumns / kTileColumns, place = column % kTileColumns;
    bytes = weight.bits == 8 ? 2 : 1;
    codes = weight.codes + column / kPanelColumns * weight.panel_bytes + tile * coded_tile_bytes(weight.bits) +
            place * bytes;
    const int64_t at = k / weight.group * weight.columns + column;
    scale = weight.scale[at];
    zero = weight.zero_point == nullptr ? 0.0F : static_cast<float>(weight.zero_point[at]);
  }

  float real(int code) const { return (static_cast<float>(code) - zero) * scale; }

  // At k and k + 1, for an even k; zero behind the last.
  void pair(int64_t k, float* values) const {
    const uint8_t* at =
        codes + k / kCodedTileK * 2 * coded_tile_bytes(weight.bits) + k % kCodedTileK / 2 * kTileColumns * bytes;
    int even = 0, odd = 0;
    if (weight.bits == 8) {
      even = static_cast<int8_t>(at[0]);
      odd = static_cast<int8_t>(at[1]);
    } else {
      even = static_cast<int8_t>(static_cast<uint8_t>(at[0] << 4)) >> 4;
      odd = static_cast<int8_t>(at[0]) >> 4;
    }
    values[0] = k < weight.k ? real(even) : 0.0F;
    values[1] = k + 1 < weight.k ? real(odd) : 0.0F;
  }

  const CodedWeight& weight;
  const uint8_t* codes;
  int64_t bytes;
  float scale, zero;
};

}  // namespace xopt::device
