// Streams on queues that torch owns: what runs operators on tensors of device xpu.
#include "sycl/torch_queue.h"

#include <link.h>

#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <unordered_map>

#include "runtime/xpu.h"
#include "sycl/stream.h"

namespace xopt::sycl_device {
namespace {

// A stream, and whose turn it is on it.
struct Taken {
  Stream stream;
  std::recursive_mutex mutex;
  Taken(const sycl::queue& queue, const std::string& cache_folder) : stream(queue, cache_folder) {}
};

struct TorchQueues {
  std::mutex mutex;
  std::string cache_folder;
  std::unordered_map<sycl::queue, Taken*> taken;
};

// Never destroyed: SYCL objects of static storage outlive the runtime that they need.
TorchQueues& torch_queues() {
  static auto* const all = new TorchQueues;
  return *all;
}

// Objects of one copy of the runtime mean nothing to another, be it of the same version.
void require_one_runtime() {
  static const std::set<std::string>* const loaded = [] {
    auto* found = new std::set<std::string>;
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* into) {
          const char* slash = std::strrchr(library->dlpi_name, '/');
          const std::string name = slash == nullptr ? library->dlpi_name : slash + 1;
          if (name.rfind("libsycl.so", 0) == 0) static_cast<std::set<std::string>*>(into)->insert(library->dlpi_name);
          return 0;
        },
        found);
    return found;
  }();
  if (loaded->size() <= 1) return;
  std::string names;
  for (const std::string& path : *loaded) names += (names.empty() ? "" : ", ") + path;
  throw std::runtime_error("xopt.sycl: torch and xopt use different SYCL runtimes (" + names +
                           "); xopt needs libsycl.so." + std::to_string(__LIBSYCL_MAJOR_VERSION) +
                           ", and torch the same file: install the torch and intel-sycl-rt that belong together");
}

QueueKernels kernels_of(void* given) {
  require_usable();
  require_one_runtime();
  const auto& queue = *static_cast<const sycl::queue*>(given);
  TorchQueues& all = torch_queues();
  Taken* taken = nullptr;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto known = all.taken.find(queue);
    taken = known != all.taken.end() ? known->second
                                     : all.taken.emplace(queue, new Taken(queue, all.cache_folder)).first->second;
  }
  std::unique_lock<std::recursive_mutex> turn(taken->mutex);
  return {&taken->stream, std::move(turn)};
}

}  // namespace

void serve_torch(const std::string& cache_folder) {
  torch_queues().cache_folder = cache_folder;
  mark_started();
  set_kernels_of_queue(&kernels_of);
}

int64_t synchronizations_on_torch_queues() {
  TorchQueues& all = torch_queues();
  const std::lock_guard<std::mutex> lock(all.mutex);
  int64_t sum = 0;
  for (const auto& [queue, taken] : all.taken) sum += taken->stream.synchronizations();
  return sum;
}

}  // namespace xopt::sycl_device
