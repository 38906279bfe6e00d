// See program.h.
//
// What is kept is the driver's machine code where the device is an OpenCL one, and SPIR-V elsewhere: Level Zero's driver
// has a cache of its own for what it makes of that.
#include "sycl/program.h"

#include <CL/cl.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <sycl/backend/opencl.hpp>

#include "runtime/cpu.h"
#include "sycl/kept_file.h"
#include "sycl/sources.h"

namespace xopt::sycl_device {
namespace {

namespace syclexp = sycl::ext::oneapi::experimental;

using Bundle = sycl::kernel_bundle<sycl::bundle_state::executable>;

// ---- OpenCL's own functions, out of the library that the SYCL runtime has loaded ------------------------------------

template <class Function>
Function* opencl_function(const char* name) {
  // By its name the runtime's own: linked to, it would have to be found, and its dependencies too, before the runtime is.
  static void* library = dlopen("libOpenCL.so.1", RTLD_LAZY | RTLD_NOLOAD);
  void* found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("xopt.sycl: OpenCL's ") + name + " was not found");
  return reinterpret_cast<Function*>(found);
}
#define XOPT_OPENCL(NAME) opencl_function<decltype(NAME)>(#NAME)

std::string machine_code(const sycl::kernel& kernel) {
  cl_program program = nullptr;
  cl_kernel native = sycl::get_native<sycl::backend::opencl>(kernel);
  size_t size = 0;
  bool good =
      XOPT_OPENCL(clGetKernelInfo)(native, CL_KERNEL_PROGRAM, sizeof(cl_program), static_cast<void*>(&program),
                                   nullptr) == CL_SUCCESS &&
      XOPT_OPENCL(clGetProgramInfo)(program, CL_PROGRAM_BINARY_SIZES, sizeof(size), &size, nullptr) == CL_SUCCESS;
  std::string code(good ? size : 0, '\0');
  auto* data = reinterpret_cast<unsigned char*>(code.data());
  good = good && size > 0 &&
         XOPT_OPENCL(clGetProgramInfo)(program, CL_PROGRAM_BINARIES, sizeof(data), static_cast<void*>(&data),
                                       nullptr) == CL_SUCCESS;
  return good ? code : std::string();
}

// ---- The two kinds of programs ---------------------------------------------------------------------------------------

// `prefix`: what the compiler puts before the name of a free function, where the runtime does not know of it.
class BundleProgram final : public Program {
 public:
  BundleProgram(Bundle bundle, std::string prefix) : bundle_(std::move(bundle)), prefix_(std::move(prefix)) {}
  sycl::kernel kernel(const std::string& name) override { return bundle_.ext_oneapi_get_kernel(prefix_ + name); }

 private:
  Bundle bundle_;
  std::string prefix_;
};

constexpr const char* kFreeFunctionPrefix = "__sycl_kernel_";

class OpenClProgram final : public Program {
 public:
  OpenClProgram(cl_program program, sycl::context context) : program_(program), context_(std::move(context)) {}
  sycl::kernel kernel(const std::string& name) override {
    cl_int status = CL_SUCCESS;
    cl_kernel native = XOPT_OPENCL(clCreateKernel)(program_, (kFreeFunctionPrefix + name).c_str(), &status);
    if (status != CL_SUCCESS) throw std::runtime_error("xopt.sycl: a kept program has no kernel " + name);
    return sycl::make_kernel<sycl::backend::opencl>(native, context_);
  }

 private:
  cl_program program_;
  sycl::context context_;
};

// nullptr where the driver does not take it.
std::unique_ptr<Program> from_machine_code(const std::string& code, const sycl::context& context,
                                           const sycl::device& device) {
  cl_device_id native = sycl::get_native<sycl::backend::opencl>(device);
  const size_t size = code.size();
  const auto* data = reinterpret_cast<const unsigned char*>(code.data());
  cl_int status = CL_SUCCESS, result = CL_SUCCESS;
  cl_program program = XOPT_OPENCL(clCreateProgramWithBinary)(sycl::get_native<sycl::backend::opencl>(context), 1,
                                                              &native, &size, &data, &status, &result);
  if (result != CL_SUCCESS || status != CL_SUCCESS) return nullptr;
  if (XOPT_OPENCL(clBuildProgram)(program, 1, &native, "", nullptr, nullptr) != CL_SUCCESS) return nullptr;
  return std::make_unique<OpenClProgram>(program, context);
}

std::unique_ptr<Program> from_spirv(const std::string& code, const sycl::context& context) {
  const auto* data = reinterpret_cast<const std::byte*>(code.data());
  const std::vector<std::byte> bytes(data, data + code.size());
  auto source = syclexp::create_kernel_bundle_from_source(context, syclexp::source_language::spirv, bytes);
  return std::make_unique<BundleProgram>(syclexp::build(source), kFreeFunctionPrefix);
}

const char* source_text(const std::string& name) {
  const std::string path = "sycl/device/" + name;
  for (int i = 0; i < kSourceCount; ++i) {
    if (path == kSources[i].path) return kSources[i].text;
  }
  throw std::runtime_error("xopt.sycl: there is no device source " + name);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

ProgramCache::ProgramCache(sycl::context context, sycl::device device, std::string folder)
    : context_(std::move(context)), device_(std::move(device)), folder_(std::move(folder)) {}

// All that the machine code depends on. The CPU's features stand for its model, which a hypervisor may mask.
std::string ProgramCache::key(const std::string& source, const std::vector<std::string>& options) const {
  namespace info = sycl::info::device;
  std::string text = source;
  for (const std::string& option : options) text += "\n" + option;
  const sycl::platform platform = device_.get_platform();
  const char* target = std::getenv("CL_CONFIG_CPU_TARGET_ARCH");
  for (const std::string& fact :
       {device_.get_info<info::name>(), device_.get_info<info::version>(), device_.get_info<info::driver_version>(),
        platform.get_info<sycl::info::platform::version>(), std::to_string(__LIBSYCL_MAJOR_VERSION),
        std::string(isa_name(detected_isa())), std::string(cpu_features().brand), std::string(target ? target : "")}) {
    text += "\n" + fact;
  }
  for (int i = 0; i < kSourceCount; ++i) text += std::string("\n") + kSources[i].path + "\n" + kSources[i].text;
  return text;
}

std::unique_ptr<Program> ProgramCache::compile(const std::string& source, const std::vector<std::string>& options,
                                               std::string* content) {
  syclexp::include_files headers;
  for (int i = 0; i < kSourceCount; ++i) headers.add(kSources[i].path, kSources[i].text);
  std::vector<std::string> all = options;
  all.insert(all.end(), {"-I.", "-fsycl-device-code-split=off"});
  std::string log, what;
  try {
    auto parsed = syclexp::create_kernel_bundle_from_source(context_, syclexp::source_language::sycl,
                                                            source_text(source), syclexp::properties{headers});
    Bundle bundle =
        syclexp::build(parsed, {device_}, syclexp::properties{syclexp::build_options{all}, syclexp::save_log{&log}});
    const bool opencl = device_.get_backend() == sycl::backend::opencl;
    const std::string first_kernel = source.substr(0, source.find('.'));
    if (!bundle.ext_oneapi_has_kernel(first_kernel)) {
      throw std::runtime_error("the device lacks what kernel " + first_kernel + " needs");
    }
    if (opencl) {
      *content = machine_code(bundle.ext_oneapi_get_kernel(first_kernel));
    } else {
      for (const auto& image : bundle) {
        const auto bytes = image.ext_oneapi_get_backend_content();
        content->assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      }
    }
    return std::make_unique<BundleProgram>(std::move(bundle), "");
  } catch (const std::exception& error) {
    what = error.what();
  }
  std::string text =
      "xopt.sycl: " + source + " did not build for " + device_.get_info<sycl::info::device::name>() + " with";
  for (const std::string& option : options) text += " " + option;
  throw std::runtime_error(text + ": " + what + (log.empty() ? "" : "\n" + log));
}

Program& ProgramCache::program(const std::string& source, const std::vector<std::string>& options) {
  std::string name = source;
  for (const std::string& option : options) name += " " + option;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto known = programs_.find(name);
  if (known != programs_.end()) return *known->second;

  const auto start = std::chrono::steady_clock::now();
  const bool opencl = device_.get_backend() == sycl::backend::opencl;
  const std::string whole_key = key(source, options);
  const std::string path = folder_.empty() ? std::string() : kept_path(folder_, whole_key);
  std::unique_ptr<Program> made;
  if (!path.empty()) {
    const Kept kept = read_kept(path, whole_key);
    if (kept.state == KeptState::read) {
      made = opencl ? from_machine_code(kept.content, context_, device_) : from_spirv(kept.content, context_);
    }
    if (kept.state != KeptState::absent && made == nullptr) ++counts_.rejected;
  }
  if (made != nullptr) {
    ++counts_.read;
    counts_.read_seconds += seconds_since(start);
  } else {
    std::string content;
    made = compile(source, options, &content);
    if (!path.empty() && !content.empty()) write_kept(path, whole_key, content);
    ++counts_.compiled;
    counts_.compile_seconds += seconds_since(start);
  }
  return *programs_.emplace(name, std::move(made)).first->second;
}

BuildCounts ProgramCache::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace xopt::sycl_device
