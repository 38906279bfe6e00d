// A head of keys as attention sees it: its rows of queries, its keys and values, its outputs.
#pragma once

#include "kernels/attention_softmax.h"
#include "kernels/gemm_plan.h"

namespace xopt::XOPT_ISA {

// Row = query * group + head of the group. Found for many rows at once: a division costs as much as a row's softmax.
struct RowPlace {
  int64_t query, head;  // head of the group
};
XOPT_INLINE void find_places(const AttentionCall& call, int64_t first, int64_t count, RowPlace* places) {
  RowPlace place{first / call.group, first % call.group};
  for (int64_t i = 0; i < count; ++i) {
    places[i] = place;
    if (++place.head < call.group) continue;
    place.head = 0;
    ++place.query;
  }
}

// A head of keys, and what all ways of computing it have in common.
template <class T>
struct AttentionHead {
  const AttentionCall& call;
  int64_t batch, head;

  const T* queries(RowPlace place) const {
    const HeadsView& view = call.query;
    return static_cast<const T*>(view.data) + batch * view.batch_stride + query_head(place) * view.head_stride +
           place.query * view.row_stride;
  }
  const T* keys(int64_t key) const { return at(call.key, key); }
  const T* values(int64_t key) const { return at(call.value, key); }
  T* out(RowPlace place) const {
    const int64_t query = batch * call.queries + place.query;
    return static_cast<T*>(call.out) + (query * call.heads * call.group + query_head(place)) * call.value_depth;
  }

  // Columns of a block of keys that a row sees.
  KeyRange seen(RowPlace place, int64_t key, int64_t count) const {
    const KeyRange keys = keys_of_queries(call, place.query, place.query);
    return {maximum<int64_t>(0, keys.begin - key), minimum(count, keys.end - key)};
  }
  const float* bias(MaskRow* mask, RowPlace place, int64_t key, int64_t count) const {
    return mask->load(batch, query_head(place), place.query, key, count);
  }

 private:
  int64_t query_head(RowPlace place) const { return head * call.group + place.head; }
  const T* at(const HeadsView& view, int64_t key) const {
    return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride +
           key * view.row_stride;
  }
};

// What a row's sums have to be multiplied by in the end; 0 for a row that saw nothing, whose sums do not count.
XOPT_INLINE float inverse_of(float sum) { return sum == 0 ? 0.0F : 1.0F / sum; }

template <class T>
XOPT_INLINE void write_scaled(const float* sums, float inverse, int64_t count, T* out) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const F x = inverse == 0 ? set1(0.0F) : mul(load(sums + i), set1(inverse));
    store_first(out + i, x, count - i);
  }
}

// Items of unequal length (causality) go to whichever thread is free: no item's result depends on another.
template <class Compute>
void for_each_item(int64_t items, int64_t threads, const Compute& make_compute) {
  int64_t next = 0;
  parallel_for_some(static_cast<int>(minimum(items, threads)), [&](int, int) {
    auto compute = make_compute();
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (item >= items) return;
      compute(item);
    }
  });
}

}  // namespace xopt::XOPT_ISA
