// Kernel "attention" on a device. See kernels/attention.h and device/attention.sycl.
#include "kernels/attention.h"

#include <stdexcept>

#include "sycl/device/attention_local.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

// Local memory that a build may have: the least that serves, so that a GPU keeps several groups on a core.
constexpr int64_t kLocalBytes[] = {24 << 10, 48 << 10, 96 << 10, 240 << 10};

// The tiling with as many rows as local memory allows, and the local memory that it takes.
struct Plan {
  Tiling tiling;
  int64_t local;
};

Plan plan_of(Stream& stream, DType dtype, const AttentionCall& call) {
  Plan plan{stream.tiling(dtype), 0};
  const int64_t stored = dtype_size(dtype), staged = plan.tiling.matrix ? stored : dtype_size(DType::f32);
  const auto needed = [&] {
    return attention_sizes(plan.tiling.rows(), staged, stored, call.depth, call.value_depth).bytes;
  };
  int64_t most = 0;
  for (const int64_t bytes : kLocalBytes) most = bytes <= stream.local_bytes() ? bytes : most;
  while (needed() > most && plan.tiling.tiles_m > 1) plan.tiling.tiles_m /= 2;
  if (needed() > most) {
    throw std::runtime_error("xopt::attention: query: depths of " + std::to_string(call.depth) + " and " +
                             std::to_string(call.value_depth) + " take " + std::to_string(needed()) +
                             " bytes of local memory, of which " + stream.facts().name + " gives " +
                             std::to_string(most));
  }
  // A CPU has nothing to gain from a small one, and one build serves all.
  plan.local = most;
  for (const int64_t bytes : kLocalBytes) {
    if (!stream.is_cpu() && bytes >= needed() && bytes < plan.local) plan.local = bytes;
  }
  return plan;
}

void attend(DType dtype, const AttentionCall& call) {
  Stream& stream = Stream::current();
  const int64_t heads = call.batch * call.heads * call.group;
  if (heads == 0 || call.queries == 0 || call.value_depth == 0) return;
  const Plan plan = plan_of(stream, dtype, call);
  const std::string local = std::to_string(plan.local), rows = std::to_string(plan.tiling.rows());
  sycl::kernel& kernel = stream.kernel("attention", dtype_name(dtype) + (" " + local + " " + rows),
                                       [&] { return attention_options(plan.tiling, dtype, plan.local); });
  const auto lanes = static_cast<size_t>(plan.tiling.lanes);
  const auto blocks = static_cast<size_t>(ceil_div(call.queries, plan.tiling.rows()));
  stream.launch(kernel, {{static_cast<size_t>(heads), blocks, lanes}, {1, 1, lanes}}, call);
  stream.finish();
}

void attention_f32(const AttentionCall& call) { attend(DType::f32, call); }
void attention_bf16(const AttentionCall& call) { attend(DType::bf16, call); }
void attention_f16(const AttentionCall& call) { attend(DType::f16, call); }

XOPT_REGISTER_SYCL_KERNEL(attention, f32, attention_f32);
XOPT_REGISTER_SYCL_KERNEL(attention, bf16, attention_bf16);
XOPT_REGISTER_SYCL_KERNEL(attention, f16, attention_f16);

}  // namespace
}  // namespace xopt::sycl_device
