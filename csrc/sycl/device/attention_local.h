// How device/attention.sycl cuts up its local memory, which the host has to know to tell how much it takes.
#pragma once

#include "tiles/layout.h"

namespace xopt {

constexpr int kAttentionKeys = 32;  // in a block

struct AttentionSizes {
  int64_t depth, value_depth;                                           // padded
  int64_t queries, keys, values, scores, weights, out, largest, total;  // offsets in bytes
  int64_t bytes;
};

// `staged` and `stored`: bytes of an element of A and of B.
inline AttentionSizes attention_sizes(int64_t rows, int64_t staged, int64_t stored, int64_t depth,
                                      int64_t value_depth) {
  AttentionSizes s{};
  const int64_t sum = 4;
  s.depth = round_up(depth > 0 ? depth : 1, kPanelColumns);
  s.value_depth = round_up(value_depth > 0 ? value_depth : 1, kPanelColumns);
  s.queries = 0;
  s.keys = s.queries + rows * s.depth * staged;
  s.values = s.keys + kAttentionKeys * s.depth * stored;
  s.scores = s.values + kAttentionKeys * s.value_depth * stored;
  s.weights = s.scores + rows * kAttentionKeys * sum;
  s.out = s.weights + rows * kAttentionKeys * staged;
  s.largest = s.out + rows * s.value_depth * sum;
  s.total = s.largest + rows * sum;
  s.bytes = s.total + rows * sum;
  return s;
}

}  // namespace xopt
