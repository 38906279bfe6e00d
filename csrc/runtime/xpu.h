// Kernels for tensors of device xpu, torch's name for Intel GPUs. Three that do not know each other meet here: ops/, which
// asks torch for the queue; the SYCL part, a library of its own that has the kernels; and Python, which loads that one
// when it is first needed.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "runtime/registry.h"

namespace xopt {

// What runs kernels on a queue, and the right to: threads that share a queue take turns, operator by operator.
struct QueueKernels {
  Offload* offload = nullptr;
  std::unique_lock<std::recursive_mutex> turn;
};

// `queue`: a sycl::queue*, of which nothing is kept but a copy. Throws where kernels cannot run on it.
using KernelsOfQueue = QueueKernels (*)(void* queue);
void set_kernels_of_queue(KernelsOfQueue function);

// Loads the part that calls the above; answers what is missing, in words, or nothing.
using SyclLoader = std::function<std::string()>;
void set_sycl_loader(SyclLoader loader);

// Loads the part where that has not been done. Throws std::runtime_error with what is missing.
QueueKernels kernels_of_queue(void* queue);

}  // namespace xopt
