// Attention: softmax(scale * query key^T + mask) value, for every query on its own.
//
// Queries of `group` heads share a head of keys and values. Query i sees the keys i + first_offset to i + last_offset
// (causality and a sliding window make this band) that the mask lets it see; one that sees none gets zeros. A query may
// have a sink: one more score, of a key whose value is nothing. Scores, the softmax and all sums are fp32.
#pragma once

#include "runtime/tuning.h"
#include "tiles/types.h"

namespace xopt {

enum class MaskKind : uint8_t { none, allowed, f32, bf16, f16 };  // `allowed`: bytes, 0 for what must not be seen

// [batch, query head, query, key], with strides of 0 where it is broadcast. Of a float kind it is added to the scores.
struct AttentionMask {
  int64_t offset(int64_t of_batch, int64_t head) const {
    return of_batch % batches * batch_stride + head * head_stride;
  }

  MaskKind kind = MaskKind::none;
  const void* data = nullptr;
  int64_t batches = 1;  // after which it begins anew
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
};

struct AttentionCall {
  int64_t batch, heads, group;  // heads of keys; query head h belongs to head h / group
  int64_t queries, keys, depth, value_depth;
  HeadsView query, key, value;
  AttentionMask mask;
  AttentionMask sinks;  // of one key, and of a float kind
  float scale;
  int64_t first_offset, last_offset;  // within +-(queries + keys)
  void* out;                          // [batch, queries, heads * group, value_depth], contiguous, of the inputs' dtype
  Tuning tuning = {};
};

using AttentionFn = void(const AttentionCall& call);  // kernel "attention", dtype f32, bf16, f16

}  // namespace xopt
