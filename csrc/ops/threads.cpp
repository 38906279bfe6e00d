// Tells the runtime how many threads torch wants. torch applies torch.set_num_threads to a Python thread only when that
// thread first runs a parallel torch op; asking torch itself is right from the first call on.
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

#include "runtime/parallel.h"

namespace {

int torch_threads() {
  uint32_t threads = 1;
  return torch_get_num_threads(&threads) == AOTI_TORCH_SUCCESS ? static_cast<int>(threads) : 1;
}

[[gnu::constructor]] void follow_torch() { xopt::set_thread_source(&torch_threads); }

}  // namespace
