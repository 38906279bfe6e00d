// Calls of GEMMs and convolutions that autotuning may have a say in: which key each has, and how it is repeated.
#pragma once

#include "kernels/conv.h"
#include "kernels/gemm.h"
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
  sizes = {call.images,
           v.channels,
           call.products,
           call.product_columns,
           static_cast<int64_t>(v.dtype),
           epilogue_kind(call.epilogue)};
  for (int i = 0; i < 3; ++i) {
    for (const int64_t size : {v.in[i], v.out[i], v.kernel[i], v.stride[i], v.dilation[i], v.padding[i]}) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

template <class Fn, class Call>
void run_as_chosen(Kernel<Fn>& kernel, Call call, const Tuning& choice) {
  call.tuning = choice;
  if (choice.level < 0) return kernel(call);
  const Isa limit = static_cast<Isa>(choice.level);
  kernel.run_up_to(limit < active_isa() ? limit : active_isa(), call);
}

template <class Fn, class Call>
void run_tuned(Kernel<Fn>& kernel, const Call& call) {
  // What another device runs has none of these choices.
  if (!tuning_on() || call.weight.k_tiles == 0 || current_offload() != nullptr) return kernel(call);
  struct Context {
    Kernel<Fn>& kernel;
    const Call& call;
  } const context{kernel, call};
  const auto run = [](const void* given, const Tuning& choice) {
    const auto& again = *static_cast<const Context*>(given);
    run_as_chosen(again.kernel, again.call, choice);
  };
  const PackedWeight& w = call.weight;
  const TuningTrial trial{run, &context, w.panel_data, static_cast<size_t>(w.panels * w.panel_bytes)};
  const TuningKey key{kernel.name(), kernel.dtype(), active_isa(), max_threads(), tuned_sizes(call)};
  run_as_chosen(kernel, call, choose_tuning(key, trial));
}

}  // namespace xopt::ops
