// Tensors that are broadcast to one shape as torch does it: what that is, how the result lies in memory, and loops over
// all of them.
#pragma once

#include <algorithm>
#include <utility>

#include "ops/check.h"

namespace xopt::ops {

inline constexpr int kBroadcastDims = 8;
static_assert(kBroadcastDims == Integers::kMost);

// Sizes, strides, or dimensions in some order.
struct Dims {
  int64_t values[kBroadcastDims] = {};
  int64_t count = 0;
};

// How a tensor lies in memory, or a result that is still to be made.
struct Lying {
  Dims sizes, strides;

  static Lying of(const Checked& checked) {
    const Tensor& tensor = checked.tensor;
    if (tensor.dims() > kBroadcastDims) {
      checked.fail("expected at most ", kBroadcastDims, " dimensions, got shape ", tensor.shape_text());
    }
    Lying lying;
    lying.sizes.count = lying.strides.count = tensor.dims();
    std::copy_n(tensor.sizes(), tensor.dims(), lying.sizes.values);
    for (int64_t dim = 0; dim < tensor.dims(); ++dim) lying.strides.values[dim] = tensor.stride(dim);
    return lying;
  }
  // Without gaps, by its dimensions from the outermost to the innermost.
  static Lying in_order(const Dims& sizes, const Dims& order) {
    Lying lying{sizes, sizes};
    int64_t stride = 1;
    for (int64_t i = order.count - 1; i >= 0; --i) {
      lying.strides.values[order.values[i]] = stride;
      stride *= sizes.values[order.values[i]];
    }
    return lying;
  }

  // The stride along a dimension of a shape that it is broadcast to.
  int64_t stride_in(const Dims& whole, int64_t dim) const {
    const int64_t own = dim - (whole.count - sizes.count);
    return own < 0 || sizes.values[own] == 1 ? 0 : strides.values[own];
  }
};

// False where the shapes do not go with each other.
inline bool broadcast(const Dims& first, const Dims& second, Dims* sizes) {
  sizes->count = std::max(first.count, second.count);
  for (int64_t from_last = 1; from_last <= sizes->count; ++from_last) {
    const int64_t one = from_last <= first.count ? first.values[first.count - from_last] : 1;
    const int64_t other = from_last <= second.count ? second.values[second.count - from_last] : 1;
    if (one != other && one != 1 && other != 1) return false;
    sizes->values[sizes->count - from_last] = one == 1 ? other : one;
  }
  return true;
}

// Whether a dimension lies within another in memory: -1 or 1 by the first part that is broadcast along neither.
inline int compare_dims(const Lying& first, const Lying& second, const Dims& sizes, int64_t one, int64_t other) {
  for (const Lying* part : {&first, &second}) {
    const int64_t inner = part->stride_in(sizes, one), outer = part->stride_in(sizes, other);
    if (inner == 0 || outer == 0) continue;
    if (inner != outer) return inner < outer ? -1 : 1;
    if (sizes.values[one] > sizes.values[other]) return 1;
  }
  return 0;
}

// As torch has it: dimensions from the outermost in memory to the innermost, sorted from the last on by insertion.
inline Dims order_of(const Lying& first, const Lying& second, const Dims& sizes) {
  Dims order;
  order.count = sizes.count;
  for (int64_t i = 0; i < order.count; ++i) {
    int64_t at = order.count - 1 - i;
    order.values[at] = at;
    for (int64_t inner = at + 1; inner < order.count; ++inner) {
      const int compared = compare_dims(first, second, sizes, order.values[inner], order.values[at]);
      if (compared < 0) break;
      if (compared == 0) continue;
      std::swap(order.values[inner], order.values[at]);
      at = inner;
    }
  }
  return order;
}

// The sizes and strides of a kernel's loops, from the outermost to the innermost: dimensions that lie alike in all parts
// as one, and ones in front. `strides`: for each part, where its strides go.
template <size_t kParts>
void set_loops(const Lying (&parts)[kParts], int count, const Dims& sizes, const Dims& order,
               int64_t (&loops)[kBroadcastDims], int64_t* const (&strides)[kParts]) {
  std::fill_n(loops, kBroadcastDims, 1);
  int at = kBroadcastDims;
  for (int64_t i = order.count - 1; i >= 0; --i) {
    const int64_t dim = order.values[i], size = sizes.values[dim];
    if (size == 1) continue;
    bool goes_on = at < kBroadcastDims;
    for (int part = 0; goes_on && part < count; ++part) {
      goes_on = parts[part].stride_in(sizes, dim) == strides[part][at] * loops[at];
    }
    if (goes_on) {
      loops[at] *= size;
      continue;
    }
    loops[--at] = size;
    for (int part = 0; part < count; ++part) strides[part][at] = parts[part].stride_in(sizes, dim);
  }
}

}  // namespace xopt::ops
