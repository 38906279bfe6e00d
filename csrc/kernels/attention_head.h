// A head of keys as attention sees it: its rows of queries, its keys and values, its outputs.
#pragma once

#include "kernels/attention_pack.h"
#include "kernels/attention_softmax.h"
#include "kernels/each_item.h"
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

// Of a row block.
template <int64_t N>
struct BlockState : SoftmaxState<N> {
  float magnitude;  // of its queries, where probabilities may be made in integers
};

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
  // Those from `key` on, at most so many.
  HeadRows<T> some_keys(int64_t key, int64_t most) const {
    return {keys(key), call.key.row_stride, minimum(most, call.keys - key), call.depth};
  }
  HeadRows<T> some_values(int64_t key, int64_t most) const {
    return {values(key), call.value.row_stride, minimum(most, call.keys - key), call.value_depth};
  }
  T* out(RowPlace place) const {
    const int64_t query = batch * call.queries + place.query;
    return static_cast<T*>(call.out) + (query * call.heads * call.group + query_head(place)) * call.value_depth;
  }

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
  float magnitude_of_queries(const RowPlace* places, int64_t rows) const {
    const int64_t at_once = call.group == 1 ? rows : 1;  // that lie at one distance
    float most = 0;
    for (int64_t row = 0; row < rows; row += at_once) {
      const HeadRows<T> some{queries(places[row]), call.query.row_stride, at_once, call.depth};
      most = maximum(largest_magnitude(some), most);
    }
    return most;
  }
#endif

  // What a row's sums have to be multiplied by in the end, of which that of its probabilities is `sum`; `largest`: that of
  // its scores. 0 for a row that saw nothing, whose sums do not count.
  float inverse_of(RowPlace place, float sum, float largest) const {
    if (sum == 0) return 0.0F;
    if (call.sinks.kind == MaskKind::none) return 1.0F / sum;
    return 1.0F / (sum + __builtin_exp2f(sink(place) * kLog2E - largest * score_unit(call)));
  }

  // Masks scores of rows with a block of keys, and looks at them. `places`: of the rows.
  template <class Softmax>
  void mask(Range rows, const RowPlace* places, int64_t key, int64_t count, MaskRow* mask, Softmax* softmax) const {
    const bool all_seen = is_within_band(rows, key, count), no_mask = allows_all(key, count);
    if (all_seen && no_mask && count % kWidth == 0 && softmax->scales_later()) return softmax->look_at(0, rows.size());
    const bool one = no_mask || rows_share_mask();
    const float* first = no_mask ? nullptr : bias(mask, places[0], key, count);
    softmax->mask([&](int64_t row) { return all_seen ? KeyRange{0, count} : seen(places[row], key, count); },
                  [&](int64_t row) { return one ? first : bias(mask, places[row], key, count); });
  }

  // Whether all rows see all keys of a block, and there is nothing to mask.
  bool sees_all(Range rows, int64_t key, int64_t count) const {
    return is_within_band(rows, key, count) && allows_all(key, count);
  }

 private:
  bool is_within_band(Range rows, int64_t key, int64_t count) const {
    const int64_t first = rows.begin / call.group, last = (rows.end - 1) / call.group;
    return keys_of_queries(call, last, last).begin <= key && keys_of_queries(call, first, first).end >= key + count;
  }
  // As where a mask hides padding.
  bool rows_share_mask() const { return call.mask.row_stride == 0 && (call.group == 1 || call.mask.head_stride == 0); }
  // Whether there is no mask, or one that rows share and that hides none of these keys.
  bool allows_all(int64_t key, int64_t count) const {
    const AttentionMask& mask = call.mask;
    if (mask.kind == MaskKind::none) return true;
    if (mask.kind != MaskKind::allowed || !rows_share_mask()) return false;
    const auto* allowed =
        static_cast<const uint8_t*>(mask.data) + mask.offset(batch, head * call.group) + key * mask.column_stride;
    bool all = true;
    for (int64_t i = 0; i < count; ++i) all = all && allowed[i * mask.column_stride] != 0;
    return all;
  }
  // Columns of a block of keys that a row sees.
  KeyRange seen(RowPlace place, int64_t key, int64_t count) const {
    const KeyRange keys = keys_of_queries(call, place.query, place.query);
    return {maximum<int64_t>(0, keys.begin - key), minimum(count, keys.end - key)};
  }
  const float* bias(MaskRow* mask, RowPlace place, int64_t key, int64_t count) const {
    return mask->load(batch, query_head(place), place.query, key, count);
  }
  int64_t query_head(RowPlace place) const { return head * call.group + place.head; }
  float sink(RowPlace place) const {
    const AttentionMask& sinks = call.sinks;
    const int64_t index = sinks.offset(batch, query_head(place)) + place.query * sinks.row_stride;
    switch (sinks.kind) {
      case MaskKind::f32:
        return static_cast<const float*>(sinks.data)[index];
      case MaskKind::bf16:
        return first_of(static_cast<const Bf16*>(sinks.data) + index);
      default:
        return first_of(static_cast<const F16*>(sinks.data) + index);
    }
  }
  template <class Half>
  static float first_of(const Half* from) {
    float value = 0;
    store_first(&value, load_first(from, 1), 1);
    return value;
  }
  const T* at(const HeadsView& view, int64_t key) const {
    return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride +
           key * view.row_stride;
  }
};

template <class T>
XOPT_INLINE void write_scaled(const float* sums, float inverse, int64_t count, T* out) {
  const auto scaled = [&](int64_t i) { return inverse == 0 ? set1(0.0F) : mul(load(sums + i), set1(inverse)); };
  int64_t i = 0;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) store_two(out + i, scaled(i), scaled(i + kWidth));
  for (; i < count; i += kWidth) store_first(out + i, scaled(i), count - i);
}

}  // namespace xopt::XOPT_ISA
