// The weight of a convolution on its way into a packed matrix, and back. The layout says where what belongs.
#pragma once

#include <vector>

#include "ops/conv_layout.h"

namespace xopt::ops {

// A weight by strides in elements: of a group, of an output channel of the group, of an input channel of the group, and of
// positions of the kernel along depth, height and width. `data` is its first element.
struct ConvWeightView {
  const void* data;
  DType dtype;
  int64_t group, out, in;
  int64_t kernel[3];

  // The same from another element on.
  [[nodiscard]] ConvWeightView from(int64_t element) const {
    ConvWeightView view = *this;
    view.data = static_cast<const uint8_t*>(data) + element * dtype_size(dtype);
    return view;
  }
};

// The header of the packed matrix; an error of `op` where it is too large.
PackedHeader conv_header(const char* op, const ConvLayout& layout, DType dtype, bool has_zero_point = false);

// int8: what each output channel has.
struct ConvChannels {
  std::vector<float> scale;
  std::vector<int32_t> zero_point;  // empty: none, unless there are no channels either
};

// Packs into header.bytes bytes. `channels`: of a weight of s8.
void pack_conv_matrix(const char* op, const ConvLayout& layout, const ConvWeightView& weight,
                      const PackedHeader& header, void* packed, const ConvChannels& channels = {});
// Writes to where `weight`, which has the packed dtype, says; of s8 into `channels` too.
void unpack_conv_matrix(const char* op, const ConvLayout& layout, const void* packed, const ConvWeightView& weight,
                        ConvChannels* channels = nullptr);

}  // namespace xopt::ops
