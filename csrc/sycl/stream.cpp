// See stream.h.
#include "sycl/stream.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "tiles/layout.h"

namespace xopt::sycl_device {
namespace {

constexpr int kVectorLanes = 16;
constexpr int kGpuSubGroups = 4;
constexpr TileShape kPlainTile{8, 16, 16};  // 16 sums of a column fit into the registers of AVX-512

DType weight_dtype(DType dtype) { return dtype == DType::u8 ? DType::s8 : dtype; }

// The depth of a tile of bf16 in elements of another size.
int depth_of(DType dtype, int k) { return static_cast<int>(k * 2 / dtype_size(dtype)); }

TileShape bf16_depth(DType dtype, const TileShape& tile) {
  return {tile.m, tile.n, static_cast<int>(tile.k * dtype_size(dtype) / 2)};
}

bool serves(const MatrixShape& shape, DType a, const TileShape& tile) {
  if (shape.a != a || shape.b != weight_dtype(a)) return false;
  if (shape.at_most) return tile.m <= shape.m && tile.n <= shape.n && tile.k <= shape.k;
  return tile.m <= shape.m && tile.n == shape.n && tile.k == shape.k;
}

// The largest tile that a packed weight can be cut into.
std::optional<TileShape> best_tile(const DeviceFacts& facts, DType dtype) {
  std::optional<TileShape> best;
  for (const MatrixShape& shape : facts.matrix_shapes) {
    const TileShape tile{std::min(shape.m, 16), std::min<int>(shape.n, kTileColumns),
                         std::min<int>(shape.k, static_cast<int>(packed_tile_k(weight_dtype(dtype))))};
    const bool fits =
        kTileColumns % tile.n == 0 && packed_tile_k(weight_dtype(dtype)) % tile.k == 0 && serves(shape, dtype, tile);
    if (fits && (!best || tile.m * tile.n * tile.k > best->m * best->n * best->k)) best = tile;
  }
  return best;
}

struct LeftToCpu {
  std::mutex mutex;
  std::map<std::string, int64_t> calls;
};
LeftToCpu& left_to_cpu() {
  static auto* const all = new LeftToCpu;
  return *all;
}

}  // namespace

std::map<std::string, int64_t> calls_left_to_cpu() {
  const std::lock_guard<std::mutex> lock(left_to_cpu().mutex);
  return left_to_cpu().calls;
}

KernelRecord*& first_sycl_kernel() {
  static KernelRecord* head = nullptr;
  return head;
}

Tiling Tiling::of(DType dtype, const TileShape& tile, bool matrix, bool is_cpu) {
  Tiling tiling{};
  tiling.tile = {tile.m, tile.n, depth_of(dtype, tile.k)};
  tiling.matrix = matrix;
  tiling.lanes = tile.n;
  // Four tiles of sums: of AMX's eight registers as of the 128 that a GPU's thread has by default, without spills.
  tiling.tiles_m = matrix && tile.n == kTileColumns ? 2 : 1;
  tiling.sub_groups = is_cpu ? 1 : kGpuSubGroups;
  return tiling;
}

Options Tiling::options(DType dtype) const {
  return {std::string("-DXOPT_DTYPE_") + dtype_name(dtype),
          build_option("MATRIX", matrix ? 1 : 0),
          build_option("TM", tile.m),
          build_option("TN", tile.n),
          build_option("TK", tile.k),
          build_option("SG", lanes),
          build_option("TILES_M", tiles_m),
          build_option("SUBGROUPS", sub_groups)};
}

Stream::Stream(const sycl::device& device, const std::string& cache_folder, std::optional<TileShape> forced,
               Waits waits)
    : Stream({sycl::context(device), device, sycl::property_list{sycl::property::queue::in_order()}}, cache_folder,
             forced, waits) {}

Stream::Stream(const sycl::queue& queue, const std::string& cache_folder)
    : Stream(queue, cache_folder, std::nullopt, Waits::never) {}

Stream::Stream(sycl::queue queue, const std::string& cache_folder, std::optional<TileShape> forced, Waits waits)
    : queue_(std::move(queue)),
      context_(queue_.get_context()),
      facts_(facts_of(queue_.get_device())),
      programs_(context_, queue_.get_device(), cache_folder),
      forced_(forced),
      waits_(waits),
      is_cpu_(queue_.get_device().is_cpu()) {
  if (!queue_.is_in_order()) {
    throw std::runtime_error("xopt.sycl: queue: expected one that is in order, got another on " + facts_.name);
  }
  const auto& sizes = facts_.sub_group_sizes;
  if (sizes.empty()) throw std::runtime_error("xopt.sycl: " + facts_.name + " has no sub-groups");
  const bool usual = std::find(sizes.begin(), sizes.end(), kVectorLanes) != sizes.end();
  lanes_ = usual ? kVectorLanes : static_cast<int>(sizes.back());
}

KernelRecord* Stream::find(const char* name, const char* dtype) {
  for (KernelRecord* record = first_sycl_kernel(); record != nullptr; record = record->next) {
    if (std::strcmp(record->name, name) == 0 && std::strcmp(record->dtype, dtype) == 0) return record;
  }
  if (waits_ == Waits::never) {
    throw std::runtime_error(std::string("xopt: tensors on xpu: kernel '") + name + "' of " + dtype +
                             " runs on the CPU only");
  }
  if (waits_ == Waits::at_synchronize) synchronize();  // the CPU reads what kernels may still be writing
  const std::lock_guard<std::mutex> lock(left_to_cpu().mutex);
  ++left_to_cpu().calls[std::string(name) + " " + dtype];
  return nullptr;
}

const Tiling& Stream::tiling(DType dtype) {
  const auto known = tilings_.find(dtype);
  if (known != tilings_.end()) return known->second;
  const std::optional<TileShape> best = best_tile(facts_, dtype);
  const TileShape bf16_tile = forced_.value_or(best ? bf16_depth(dtype, *best) : kPlainTile);
  const bool matrix =
      std::any_of(facts_.matrix_shapes.begin(), facts_.matrix_shapes.end(), [&](const MatrixShape& shape) {
        return serves(shape, dtype, {bf16_tile.m, bf16_tile.n, depth_of(dtype, bf16_tile.k)});
      });
  return tilings_.emplace(dtype, Tiling::of(dtype, bf16_tile, matrix, is_cpu_)).first->second;
}

void* Stream::scratch(int64_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  // What runs may still use the old one.
  if (scratch_ != nullptr) held_.emplace_back([this, old = scratch_] { sycl::free(old, context_); });
  scratch_ = sycl::malloc_device(static_cast<size_t>(bytes), queue_);
  scratch_bytes_ = scratch_ == nullptr ? 0 : bytes;
  if (scratch_ == nullptr) {
    throw std::runtime_error("xopt.sycl: " + facts_.name + " has no " + std::to_string(bytes) +
                             " bytes of memory left for what an operator keeps meanwhile");
  }
  return scratch_;
}

const void* Stream::keep(const void* data, size_t bytes) {
  void* copy = sycl::malloc_host(bytes, context_);
  if (copy == nullptr) {
    throw std::runtime_error("xopt.sycl: there are no " + std::to_string(bytes) + " bytes of memory left that " +
                             facts_.name + " can read");
  }
  held_.emplace_back([this, copy] { sycl::free(copy, context_); });
  return std::memcpy(copy, data, bytes);
}

void Stream::synchronize() {
  require_usable();
  ++synchronizations_;
  queue_.wait();
  for (auto& [event, held] : in_use_) drop(&held);
  in_use_.clear();
  drop(&held_);
  queue_.throw_asynchronous();
}

// Kernels run in order: what one of them was the last to use is free once it has run.
void Stream::drop_what_is_done() {
  if (!held_.empty()) in_use_.emplace_back(last_, std::exchange(held_, {}));
  using Status = sycl::info::event::command_execution_status;
  while (!in_use_.empty() && in_use_.front().first.get_info<Status>() == sycl::info::event_command_status::complete) {
    drop(&in_use_.front().second);
    in_use_.pop_front();
  }
}

void Stream::drop(Drops* held) {
  for (const auto& drop_one : *held) drop_one();
  held->clear();
}

}  // namespace xopt::sycl_device
