// How the weight of a convolution, [out, in / groups, kernel...], lies in a packed matrix. Pure arithmetic; what it
// means is said in kernels/conv.h.
#pragma once

#include "kernels/packed.h"
#include "ops/check.h"

namespace xopt::ops {

struct ConvLayout {
  int64_t out, group_in, groups;
  int64_t dims;       // spatial, 1 to 3
  int64_t kernel[3];  // depth, height, width; ones in front
  bool depthwise;
  int64_t merged;  // groups in a product; those that are left over are one more

  int64_t positions() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t group_out() const { return groups == 0 ? 0 : out / groups; }
  int64_t products() const { return groups / merged; }
  int64_t rest() const { return groups % merged; }  // groups
  int64_t product_columns() const { return depthwise ? out : merged * group_out(); }
  int64_t product_channels() const { return depthwise ? out : merged * group_in; }
  int64_t padded_columns() const { return round_up(product_columns(), kPanelColumns); }
  // Of the packed matrix.
  int64_t rows() const {
    if (depthwise) return out;
    const int64_t last = rest() > 0 ? rest() : merged;
    return (ceil_div(groups, merged) - 1) * padded_columns() + last * group_out();
  }
  int64_t columns() const { return positions() * (depthwise ? 1 : merged * group_in); }
};

// Checks the sizes of a weight, named `name` in errors, and the groups. `given`: those that errors speak of.
inline ConvLayout conv_layout(const char* op, const char* name, const ListView& sizes, int64_t groups,
                              const ListView& given) {
  const int64_t count = sizes.count;
  if (count < 3 || count > 5) {
    fail(op, name, "expected [out_channels, in_channels / groups, kernel...] with 1 to 3 sizes of the kernel, got ",
         given.text());
  }
  ConvLayout layout{sizes[0], sizes[1], groups, count - 2, {1, 1, 1}, false, 1};
  int64_t elements = 1;
  for (int64_t i = 0; i < count; ++i) {
    if (sizes[i] < (i < 2 ? 0 : 1))
      fail(op, name, "expected sizes of at least ", i < 2 ? 0 : 1, ", got ", given.text());
    if (__builtin_mul_overflow(elements, sizes[i] + 1, &elements))
      fail(op, name, "its sizes ", given.text(), " are too large");
  }
  for (int64_t i = 0; i < layout.dims; ++i) layout.kernel[3 - layout.dims + i] = sizes[2 + i];
  if (groups < 1) fail(op, "groups", "expected a number of at least 1, got ", groups);
  if (layout.out % groups != 0) {
    fail(op, "groups", "expected a divisor of the ", layout.out, " output channels, got ", groups);
  }
  layout.depthwise = layout.group_in == 1 && layout.out == groups;
  if (layout.depthwise) {
    layout.merged = groups;
    return layout;
  }
  // As many groups as a product has room for in the columns that one fills up anyway; if they do not fill them, so many
  // that products are alike.
  const int64_t group_out = layout.group_out(), columns = round_up(group_out, kPanelColumns);
  if (group_out == 0) return layout;
  layout.merged = std::min(groups, columns / group_out);
  const int64_t products = ceil_div(groups, layout.merged);
  if (layout.merged * group_out < columns && groups % products == 0) layout.merged = groups / products;
  return layout;
}
inline ConvLayout conv_layout(const char* op, const char* name, const ListView& sizes, int64_t groups) {
  return conv_layout(op, name, sizes, groups, sizes);
}

// Whether a packed weight was made for this.
inline void check_conv_packed(const char* op, const PackedHeader& header, const ConvLayout& layout,
                              bool is_int8 = false) {
  if ((header.dtype == DType::s8) != is_int8 || header.gated != 0) {
    fail(op, "packed", "expected a weight as made by ", is_int8 ? "conv_pack_int8" : "conv_pack");
  }
  if (header.n != layout.rows() || header.k != layout.columns()) {
    fail(op, "packed", "expected a packed matrix of [", layout.rows(), ", ", layout.columns(),
         "] for this weight_size and these groups, got [", header.n, ", ", header.k, "]");
  }
}

}  // namespace xopt::ops
