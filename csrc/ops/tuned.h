// Calls of products, convolutions and attention that autotuning may have a say in: which key each has, and how it is
// repeated.
#pragma once

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/conv.h"
#include "kernels/gemm.h"
#include "kernels/weight_only.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "runtime/tuner.h"

namespace xopt::ops {

// What of an epilogue decides how work is best cut up. Activations do not: with and without one is the same call here.
inline int64_t epilogue_kind(const Epilogue& e) {
  return static_cast<int64_t>(e.out_dtype) * 2 + static_cast<int64_t>(e.norm != Norm::none);
}

inline std::vector<int64_t> tuned_sizes(const GemmCall& call) {
  const PackedWeight& w = call.weight;
  return {call.m,
          w.n,
          w.k,
          static_cast<int64_t>(w.gated),
          static_cast<int64_t>(call.a.dtype),
          epilogue_kind(call.epilogue)};
}

inline std::vector<int64_t> tuned_sizes(const ConvCall& call) {
  const PatchesView& v = call.input;
  std::vector<int64_t> sizes;
  sizes.reserve(24);
  sizes = {
      call.images,
      v.channels,
      call.products,
      call.product_columns,
      static_cast<int64_t>(v.dtype) + 16 * static_cast<int64_t>(call.weight.dtype),  // depthwise: no part of the name
      epilogue_kind(call.epilogue)};
  for (int i = 0; i < 3; ++i) {
    for (const int64_t size : {v.in[i], v.out[i], v.kernel[i], v.stride[i], v.dilation[i], v.padding[i]}) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

inline std::vector<int64_t> tuned_sizes(const WeightOnlyCall& call) {
  std::vector<int64_t> sizes = tuned_sizes(call.gemm);
  sizes.insert(sizes.end(), {call.codes.bits, call.codes.group});
  return sizes;
}

// A few queries have a cache of keys before them, which grows by a key a call: one choice holds up to its double.
inline bool has_key_cache(const AttentionCall& call) { return call.queries * 8 <= call.keys; }

inline std::vector<int64_t> tuned_sizes(const AttentionCall& call) {
  const auto rounded = [&](int64_t count) {
    int64_t power = 1;
    while (power < count) power *= 2;
    return has_key_cache(call) ? power : count;
  };
  // How many keys a query may see, and whether those of the first query are others than those of the last.
  const int64_t band = std::min(call.keys, call.last_offset - call.first_offset + 1);
  const bool moves = call.last_offset < call.keys - 1 || call.first_offset + call.queries > 1;
  return {call.batch,
          call.heads * call.group,
          call.queries,
          rounded(call.keys),
          call.depth,
          call.value_depth,
          call.heads,
          rounded(band),
          static_cast<int64_t>(moves),
          static_cast<int64_t>(call.mask.kind)};
}

// What a call finds in no cache of the CPU, since so much else came between: of a cache of keys both tensors. Other
// queries, keys and values have just been computed.
inline ColdMemory cold_memory(const AttentionCall& call, DType dtype) {
  if (!has_key_cache(call)) return {};
  const auto run_of = [&](const HeadsView& view, int64_t columns) {
    const int64_t elements = (call.batch - 1) * view.batch_stride + (call.heads - 1) * view.head_stride +
                             (call.keys - 1) * view.row_stride + columns;
    return ColdMemory::Run{view.data, static_cast<size_t>(elements * dtype_size(dtype))};
  };
  return {{run_of(call.key, call.depth), run_of(call.value, call.value_depth)}};
}

template <class Fn, class Call>
void run_as_chosen(Kernel<Fn>& kernel, Call call, const Tuning& choice) {
  call.tuning = choice;
  if (choice.level < 0) return kernel(call);
  const Isa limit = static_cast<Isa>(choice.level);
  kernel.run_up_to(limit < active_isa() ? limit : active_isa(), call);
}

// The level is chosen within, where the panels are multiplied.
inline void run_as_chosen(Kernel<WeightOnlyFn>& kernel, WeightOnlyCall call, const Tuning& choice) {
  call.gemm.tuning = choice;
  kernel(call);
}

template <class Fn, class Call>
void run_tuned(Kernel<Fn>& kernel, const Call& call, const ColdMemory& cold) {
  // What another device runs has none of these choices.
  if (!tuning_on() || current_offload() != nullptr) return kernel(call);
  struct Context {
    Kernel<Fn>& kernel;
    const Call& call;
  } const context{kernel, call};
  const auto run = [](const void* given, const Tuning& choice) {
    const auto& again = *static_cast<const Context*>(given);
    run_as_chosen(again.kernel, again.call, choice);
  };
  const TuningKey key{kernel.name(), kernel.dtype(), active_isa(), max_threads(), tuned_sizes(call)};
  run_as_chosen(kernel, call, choose_tuning(key, {run, &context, cold}));
}

// Of a product or a convolution, whose weight is not there any more when a model calls it again.
template <class Fn, class Call>
void run_tuned(Kernel<Fn>& kernel, const Call& call) {
  const PackedWeight& w = call.weight;
  if (w.k_tiles == 0) return kernel(call);
  run_tuned(kernel, call, {{{w.panel_data, static_cast<size_t>(w.panels * w.panel_bytes)}, {}}});
}

}  // namespace xopt::ops
