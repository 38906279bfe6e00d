// See device.h.
#include "sycl/device.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <stdexcept>

#include "runtime/cpu.h"

namespace xopt::sycl_device {
namespace {

namespace matrix = sycl::ext::oneapi::experimental::matrix;

std::atomic<bool> started{false};
std::atomic<bool> forked{false};

// The runtime's threads do not live on in a forked process, where its first call would wait for them for ever.
void forbid_after_fork() {
  if (started) forked = true;
}

std::optional<DType> dtype_of(matrix::matrix_type type) {
  switch (type) {
    case matrix::matrix_type::bf16:
      return DType::bf16;
    case matrix::matrix_type::fp16:
      return DType::f16;
    case matrix::matrix_type::sint8:
      return DType::s8;
    case matrix::matrix_type::uint8:
      return DType::u8;
    default:
      return std::nullopt;
  }
}

// Only those whose sums are those of our kernels. A size of 0 stands for any up to a largest one.
std::vector<MatrixShape> matrix_shapes(const sycl::device& device) {
  std::vector<MatrixShape> shapes;
  if (!device.has(sycl::aspect::ext_intel_matrix)) return shapes;
  for (const auto& one : device.get_info<sycl::ext::oneapi::experimental::info::device::matrix_combinations>()) {
    const auto a = dtype_of(one.atype), b = dtype_of(one.btype);
    const bool floats = one.ctype == matrix::matrix_type::fp32 && one.dtype == matrix::matrix_type::fp32;
    const bool integers = one.ctype == matrix::matrix_type::sint32 && one.dtype == matrix::matrix_type::sint32;
    if (!a || !b || (!floats && !integers)) continue;
    const auto size = [](size_t fixed, size_t most) { return static_cast<int>(fixed != 0 ? fixed : most); };
    shapes.push_back({*a, *b, size(one.msize, one.max_msize), size(one.nsize, one.max_nsize),
                      size(one.ksize, one.max_ksize), one.ksize == 0});
  }
  return shapes;
}

const char* type_name(sycl::info::device_type type) {
  switch (type) {
    case sycl::info::device_type::cpu:
      return "cpu";
    case sycl::info::device_type::gpu:
      return "gpu";
    default:
      return "other";
  }
}

const char* backend_name(sycl::backend backend) {
  switch (backend) {
    case sycl::backend::opencl:
      return "opencl";
    case sycl::backend::ext_oneapi_level_zero:
      return "level_zero";
    default:
      return "other";
  }
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::s8:
      return "s8";
    case DType::u8:
      return "u8";
    case DType::s32:
      break;
  }
  return "s32";
}

void prepare_runtime(const std::string& opencl_driver) {
  if (started) return;
  constexpr int kKeepTheUsers = 0;
  if (!opencl_driver.empty()) setenv("OCL_ICD_FILENAMES", opencl_driver.c_str(), kKeepTheUsers);
  // Where a hypervisor masks the CPU's model, the device compiler takes it for one without AMX and dies of matrix code.
  if (cpu_features().amx_bf16 && !cpu_features().emulated) {
    setenv("CL_CONFIG_CPU_TARGET_ARCH", "sapphirerapids", kKeepTheUsers);
  }
}

void mark_started() {
  static const int registered = pthread_atfork(nullptr, nullptr, &forbid_after_fork);
  (void)registered;
  started = true;
}

void require_usable() {
  if (forked) {
    throw std::runtime_error(
        "xopt.sycl: the SYCL runtime was started before this process was forked, and does not work in it: start "
        "processes by spawn, or use SYCL after the fork only");
  }
}

const std::vector<sycl::device>& all_devices() {
  require_usable();
  mark_started();
  // Never destroyed: SYCL objects of static storage outlive the runtime that they need.
  static const auto* devices = [] {
    auto* found = new std::vector<sycl::device>;
    for (const sycl::device& device : sycl::device::get_devices()) found->push_back(device);
    return found;
  }();
  return *devices;
}

DeviceFacts facts_of(const sycl::device& device) {
  namespace info = sycl::info::device;
  return {device.get_info<info::name>(),
          type_name(device.get_info<info::device_type>()),
          backend_name(device.get_backend()),
          device.get_info<info::driver_version>(),
          device.get_info<info::sub_group_sizes>(),
          matrix_shapes(device),
          device.has(sycl::aspect::usm_device_allocations),
          device.has(sycl::aspect::usm_shared_allocations),
          device.has(sycl::aspect::usm_system_allocations),
          static_cast<int64_t>(device.get_info<info::local_mem_size>()),
          static_cast<int64_t>(device.get_info<info::max_work_group_size>()),
          static_cast<int64_t>(device.get_info<info::max_compute_units>())};
}

}  // namespace xopt::sycl_device
