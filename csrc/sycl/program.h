// Device programs: compiled in memory from the device sources, and kept on disk as what the device's driver has made of
// them, so that the next process spends milliseconds where this one spends seconds.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace xopt::sycl_device {

// A source of csrc/sycl/device, compiled with options: its kernels by name.
class Program {
 public:
  virtual ~Program() = default;
  virtual sycl::kernel kernel(const std::string& name) = 0;
};

struct BuildCounts {
  int64_t compiled = 0, read = 0, rejected = 0;  // rejected: files that were there, but damaged or of something else
  double compile_seconds = 0.0, read_seconds = 0.0;
};

class ProgramCache {
 public:
  ProgramCache(sycl::context context, sycl::device device, std::string folder);

  // `source`: a name as "gemm.sycl". Throws std::runtime_error with the build log.
  Program& program(const std::string& source, const std::vector<std::string>& options);
  BuildCounts counts() const;

 private:
  std::string key(const std::string& source, const std::vector<std::string>& options) const;
  std::unique_ptr<Program> compile(const std::string& source, const std::vector<std::string>& options,
                                   std::string* content);

  sycl::context context_;
  sycl::device device_;
  std::string folder_;  // empty: nothing is kept
  std::map<std::string, std::unique_ptr<Program>> programs_;
  BuildCounts counts_;
  mutable std::mutex mutex_;
};

}  // namespace xopt::sycl_device
