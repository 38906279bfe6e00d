// A device with a queue: what runs an operator's kernels in place of the CPU while it is a thread's offload.
//
// The queue is in order, so kernels of one operator and of the next need no events between them. On tensors of the CPU
// an operator waits for its result, since what reads it next may be torch; unless the caller does so by synchronize(). On
// a queue of torch's nothing ever waits: what torch does with the result comes after it on the same queue.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <sycl/sycl.hpp>
#include <utility>
#include <vector>

#include "runtime/registry.h"
#include "sycl/device.h"
#include "sycl/program.h"
#include "tiles/layout.h"

namespace xopt::sycl_device {

using Options = std::vector<std::string>;

// A source and what it is built with.
struct Build {
  std::string source;
  Options options;
};
// All that a GPU would be asked to build for matrix units of this tile (of bf16): what tools check without one.
std::vector<Build> gpu_builds(const TileShape& tile);

// How the tiles of a dtype (that of A) are computed.
struct Tiling {
  TileShape tile;
  bool matrix;     // on matrix units
  int lanes;       // work-items in a sub-group
  int tiles_m;     // tiles of rows that a sub-group computes
  int sub_groups;  // of a work-group
  static Tiling of(DType dtype, const TileShape& bf16_tile, bool matrix, bool is_cpu);
  Options options(DType dtype) const;
  int rows() const { return tile.m * tiles_m; }
};

inline std::string build_option(const char* name, int64_t value) {
  return std::string("-DXOPT_") + name + "=" + std::to_string(value);
}
// Of kernels without tiles.
inline Options lane_options(int lanes) { return {build_option("SG", lanes)}; }
// Of products of at most kGemvRows rows, whose columns are shared by so many work-items.
inline constexpr int kGemvRows = 4, kGpuSplits = 8;
inline Options gemv_options(int lanes, int splits) {
  return {build_option("SG", lanes), build_option("ROWS", kGemvRows), build_option("SPLITS", splits)};
}
inline Options attention_options(const Tiling& tiling, DType dtype, int64_t local_bytes) {
  Options options = tiling.options(dtype);
  options.push_back(build_option("LOCAL", local_bytes));
  return options;
}

// Whose tensors a stream's kernels work on, and so who waits for them.
enum class Waits : uint8_t {
  each_operator,   // tensors of the CPU, which torch may read at once
  at_synchronize,  // the same, but their user waits; until then what kernels use is held
  never,           // tensors of device xpu, which torch only uses on the same queue
};

class Stream final : public Offload {
 public:
  // `forced`: a tile's rows, columns and depth (of bf16), in place of the device's best.
  Stream(const sycl::device& device, const std::string& cache_folder, std::optional<TileShape> forced, Waits waits);
  // On a queue of torch's.
  Stream(const sycl::queue& queue, const std::string& cache_folder);

  // The stream that the calling thread runs kernels on. Only to be called by them.
  static Stream& current() { return static_cast<Stream&>(*current_offload()); }

  KernelRecord* find(const char* name, const char* dtype) override;
  bool is_asynchronous() const override { return waits_ == Waits::at_synchronize; }
  void hold(void* object, void (*drop)(void*)) override {
    held_.emplace_back([=] { drop(object); });
  }
  void wait() override { synchronize(); }

  const Tiling& tiling(DType dtype);
  int lanes() const { return lanes_; }
  bool is_cpu() const { return is_cpu_; }
  int64_t local_bytes() const { return facts_.local_bytes; }

  // `name`: the kernel's, and its source's; with `variant`, which stands for the options, it tells one build from another.
  template <class MakeOptions>
  sycl::kernel& kernel(const char* name, const std::string& variant, const MakeOptions& make) {
    auto known = kernels_.find({name, variant});
    if (known != kernels_.end()) return known->second;
    return kernels_
        .emplace(std::pair(name, variant), programs_.program(std::string(name) + ".sycl", make()).kernel(name))
        .first->second;
  }

  template <class... Arguments>
  void launch(sycl::kernel& kernel, const sycl::nd_range<3>& range, const Arguments&... arguments) {
    require_usable();
    last_ = queue_.submit([&](sycl::handler& handler) {
      int index = 0;
      (handler.set_arg(index++, arguments), ...);
      handler.parallel_for(range, kernel);
    });
  }

  // A work-item to each item, in groups of so many. The kernel's last argument is how many items there are.
  template <class... Arguments>
  void launch_items(sycl::kernel& kernel, int64_t items, int64_t group, const Arguments&... arguments) {
    const auto rounded = static_cast<size_t>(round_up(items, group));
    launch(kernel, {{1, 1, rounded}, {1, 1, static_cast<size_t>(group)}}, arguments..., items);
  }

  // Memory for what one kernel of an operator hands to its next. The next call's may be the same.
  void* scratch(int64_t bytes);
  // A copy of what an operator has on its own stack and a kernel reads, until that has run.
  const void* keep(const void* data, size_t bytes);
  // At the end of an operator.
  void finish() {
    if (waits_ == Waits::each_operator) return synchronize();
    drop_what_is_done();
  }
  void synchronize();
  int64_t synchronizations() const { return synchronizations_; }  // how often the host has waited

  const DeviceFacts& facts() const { return facts_; }
  // Builds without running: for tools.
  void build(const std::string& source, const Options& options) { programs_.program(source, options); }
  BuildCounts builds() const { return programs_.counts(); }

 private:
  Stream(sycl::queue queue, const std::string& cache_folder, std::optional<TileShape> forced, Waits waits);

  sycl::queue queue_;
  sycl::context context_;
  DeviceFacts facts_;
  ProgramCache programs_;
  std::map<std::pair<std::string, std::string>, sycl::kernel> kernels_;
  std::map<DType, Tiling> tilings_;
  std::optional<TileShape> forced_;
  Waits waits_;
  bool is_cpu_;
  int lanes_;
  void* scratch_ = nullptr;
  int64_t scratch_bytes_ = 0;
  int64_t synchronizations_ = 0;

  // How to drop what operators have used since the last one ended, and what those before had, with the last kernel that
  // may use it.
  using Drops = std::vector<std::function<void()>>;
  Drops held_;
  std::deque<std::pair<sycl::event, Drops>> in_use_;
  sycl::event last_;

  void drop_what_is_done();
  static void drop(Drops* held);
};

// How often kernels that streams lack were asked for, by "name dtype": the CPU ran its own instead.
std::map<std::string, int64_t> calls_left_to_cpu();

// The kernels that streams have; a source registers its own.
KernelRecord*& first_sycl_kernel();

}  // namespace xopt::sycl_device

// In a source of csrc/sycl, inside its namespace: XOPT_REGISTER_SYCL_KERNEL(gemm, bf16, gemm_bf16);
#define XOPT_REGISTER_SYCL_KERNEL(NAME, DTYPE, FN)                                                              \
  static ::xopt::KernelRecord NAME##_##DTYPE##_record(#NAME, #DTYPE, reinterpret_cast<::xopt::KernelFn>(&(FN)), \
                                                      &::xopt::sycl_device::first_sycl_kernel())
