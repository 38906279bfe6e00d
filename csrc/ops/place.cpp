// See place.h.
#include "ops/place.h"

#include <dlfcn.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "ops/arguments.h"
#include "ops/xpu_weights.h"

namespace xopt::ops {
namespace {

constexpr int32_t kNoIndex = -1;

thread_local const Place* place_of_thread = nullptr;

const Place& cpu() {
  static const Place cpu{torch_codes().cpu, kNoIndex, {}};
  return cpu;
}

// torch's shim: a pointer to the sycl::queue that is current for the device.
using CurrentStream = AOTITorchError(int32_t device_index, void** queue);

// Out of torch's XPU library, which its CPU builds lack. It is loaded without making its symbols global.
CurrentStream* current_stream() {
  static CurrentStream* const found = [] {
    constexpr const char* kName = "aoti_torch_get_current_xpu_stream";
    void* symbol = dlsym(RTLD_DEFAULT, kName);
    void* library = symbol != nullptr ? nullptr : dlopen("libtorch_xpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library != nullptr) symbol = dlsym(library, kName);
    return reinterpret_cast<CurrentStream*>(symbol);
  }();
  return found;
}

QueueKernels kernels_of_device(int32_t index) {
  CurrentStream* stream = current_stream();
  if (stream == nullptr) {
    throw std::runtime_error("this build of torch gives no SYCL queues (it has no aoti_torch_get_current_xpu_stream)");
  }
  void* queue = nullptr;
  if (stream(index, &queue) != AOTI_TORCH_SUCCESS || queue == nullptr) {
    throw std::runtime_error("torch gives no SYCL queue for xpu:" + std::to_string(index));
  }
  return kernels_of_queue(queue);
}

Place place_of(AtenTensorHandle tensor) {
  Place found{kNoIndex, kNoIndex, {}};
  if (aoti_torch_get_device_type(tensor, &found.type) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_device_index(tensor, &found.index) != AOTI_TORCH_SUCCESS) {
    found.problem = "torch does not say on which device it is";
  }
  return found;
}

// Items are handles that the list owns, until the operator takes it apart.
Place place_of_items(StableListHandle list) {
  StableIValue item = 0;
  if (torch_list_get_item(list, 0, &item) != AOTI_TORCH_SUCCESS) return {torch_codes().xpu, 0, "expected tensors"};
  return place_of(torch::stable::detail::to<AtenTensorHandle>(item));
}

}  // namespace

bool Place::is_cpu() const { return type == torch_codes().cpu; }

std::string Place::text() const {
  if (is_cpu()) return "the CPU";
  return (type == torch_codes().xpu ? "xpu" : "another device") + (index < 0 ? "" : ":" + std::to_string(index));
}

const Place& place() { return place_of_thread == nullptr ? cpu() : *place_of_thread; }

InPlace::InPlace(const Place& place) : outer_(std::exchange(place_of_thread, &place)) {}
InPlace::~InPlace() { place_of_thread = outer_; }

XpuCall::XpuCall(StableIValue first, First kind)
    : here_(kind == First::tensor ? place_of(torch::stable::detail::to<AtenTensorHandle>(first))
                                  : place_of_items(torch::stable::detail::to<StableListHandle>(first))),
      in_place_(here_),
      outer_offload_(current_offload()) {
  if (!here_.problem.empty()) return;
  if (here_.type != torch_codes().xpu) {
    here_.problem = "expected a tensor on xpu, where another argument is, got one on " + here_.text();
    return;
  }
  try {
    kernels_ = kernels_of_device(here_.index);
    set_current_offload(kernels_.offload);
  } catch (const std::exception& error) {
    here_.problem = std::string("got a tensor on ") + here_.text() + ", where nothing can run: " + error.what();
  }
}

XpuCall::~XpuCall() { set_current_offload(outer_offload_); }

void call_on_host(BoxedOp* op, const char* kinds, StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  namespace stable = torch::stable::detail;
  const Place device = place_of(stable::to<AtenTensorHandle>(stack[0]));
  Place host = cpu();
  const auto to_host = [&](AtenTensorHandle handle) {
    Tensor given(handle);
    if (!given.is_in(device) || device.is_cpu()) {
      host.problem = "expected tensors on one device, got some on " + device.text() + " and on " +
                     (device.is_cpu() ? "xpu" : given.device().text());
    }
    return host.problem.empty() ? given.host_copy().release() : given.release();
  };
  for (uint64_t i = 0; i < inputs && kinds[i] != '\0'; ++i) {
    if (kinds[i] == 'T') stack[i] = stable::from(to_host(stable::to<AtenTensorHandle>(stack[i])));
    if (kinds[i] != 'O') continue;
    const auto given = stable::to<std::optional<AtenTensorHandle>>(stack[i]);
    stack[i] = stable::from(given ? std::optional<AtenTensorHandle>(to_host(*given)) : std::nullopt);
  }
  {
    const InPlace on_host(host);
    op(stack, inputs, outputs);
  }
  const InPlace on_device(device);
  for (uint64_t i = 0; i < outputs; ++i) {
    stack[i] = stable::from(moved_to_place(Tensor(stable::to<AtenTensorHandle>(stack[i]))).release());
  }
}

}  // namespace xopt::ops
