// Tensors one after the other along a dimension: the contract of the kernel "concat" (dtype f32, as every kernel that
// serves all dtypes; it copies bytes).
#pragma once

#include "tiles/types.h"

namespace xopt {

// Runs of bytes, with up to three dimensions around them. All strides are bytes.
struct CopiedRuns {
  static constexpr int kDims = 3;

  const void* from;
  int64_t at;  // where the first one goes
  int64_t size[kDims], from_stride[kDims], to_stride[kDims];
  int64_t run_bytes;
};

struct ConcatCall {
  static constexpr int kMostParts = 8;

  void* to;
  int count;
  CopiedRuns parts[kMostParts];
  int64_t unit;  // bytes of an element, of which runs are made
};

using ConcatFn = void(const ConcatCall& call);

}  // namespace xopt
