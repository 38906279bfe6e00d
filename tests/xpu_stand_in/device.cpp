// What a CPU build of torch lacks of device xpu, on the CPU's SYCL device: hooks and a device guard, by which torch takes
// such tensors; the shim that hands out the current queue; and memory of that device. See __init__.py.
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <sycl/sycl.hpp>

namespace at {
namespace {

struct XPUHooks final : XPUHooksInterface {
  XPUHooks() = default;
  explicit XPUHooks(XPUHooksArgs) {}  // as earlier releases of torch make it
  void init() const override {}
  bool hasXPU() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return {kXPU, 0}; }
};
REGISTER_XPU_HOOKS(XPUHooks)

}  // namespace
}  // namespace at

namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU> {
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::XPU, 0}; }
  c10::Device getDevice() const override { return {c10::DeviceType::XPU, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::XPU, 0});
  }
};
C10_REGISTER_GUARD_IMPL(XPU, Guard)

// Never destroyed, as torch's are not.
sycl::queue& queue() {
  static auto* const made =
      new sycl::queue(sycl::cpu_selector_v, sycl::property_list{sycl::property::queue::in_order()});
  return *made;
}

int64_t copies = 0;

// Of storages that torch makes itself, as a deep copy does.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = sycl::malloc_device(bytes, queue());
    return {data, data, &drop, {c10::DeviceType::XPU, 0}};
  }
  static void drop(void* data) {
    if (data != nullptr) sycl::free(data, queue());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { queue().memcpy(to, from, bytes).wait(); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::XPU, &memory)

}  // namespace

extern "C" {

// Left out, it is the shim of a build without XPU.
#ifndef STAND_IN_WITHOUT_QUEUES
AOTITorchError aoti_torch_get_current_xpu_stream(int32_t device_index, void** ret) {
  *ret = device_index == 0 ? &queue() : nullptr;
  return device_index == 0 ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}
#endif

void* stand_in_malloc(size_t bytes) { return sycl::malloc_device(bytes, queue()); }
void stand_in_free(void* data, void*) {
  queue().wait();  // a caching allocator would leave the memory to what comes later on the queue
  sycl::free(data, queue());
}
// Between the memories of host and device, either way.
void stand_in_copy(void* to, const void* from, size_t bytes) {
  ++copies;
  queue().memcpy(to, from, bytes).wait();
}
int64_t stand_in_copies() { return copies; }
bool stand_in_is_device_memory(const void* data) {
  return sycl::get_pointer_type(data, queue().get_context()) == sycl::usm::alloc::device;
}

}  // extern "C"
