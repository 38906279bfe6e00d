// See xpu.h.
#include "runtime/xpu.h"

#include <atomic>
#include <stdexcept>
#include <utility>

namespace xopt {
namespace {

std::atomic<KernelsOfQueue> kernels_of{nullptr};
std::atomic<SyclLoader*> load{nullptr};

}  // namespace

void set_kernels_of_queue(KernelsOfQueue function) { kernels_of = function; }

// Never destroyed: what is kept belongs to Python, which ends before the process's static storage does.
void set_sycl_loader(SyclLoader loader) { load = new SyclLoader(std::move(loader)); }

QueueKernels kernels_of_queue(void* queue) {
  if (kernels_of == nullptr) {
    const SyclLoader* loader = load;
    const std::string problem = loader == nullptr ? "xopt.sycl: nothing loads the SYCL part" : (*loader)();
    if (!problem.empty()) throw std::runtime_error(problem);
  }
  const KernelsOfQueue function = kernels_of;
  if (function == nullptr) throw std::runtime_error("xopt.sycl: the SYCL part was loaded, but takes no queues");
  return function(queue);
}

}  // namespace xopt
