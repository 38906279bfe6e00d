// Operators on tensors of device xpu, whose queues are torch's. See runtime/xpu.h.
#pragma once

#include <cstdint>
#include <string>

namespace xopt::sycl_device {

// From now on operators find a stream for each queue of torch's.
void serve_torch(const std::string& cache_folder);

// How often the host has waited for any of them.
int64_t synchronizations_on_torch_queues();

}  // namespace xopt::sycl_device
