// The device sources, as the build has put them into the library: those below csrc/sycl/device and the headers that
// they share with the host, by their path below csrc.
#pragma once

namespace xopt::sycl_device {

struct Source {
  const char* path;
  const char* text;
};

extern const Source kSources[];
extern const int kSourceCount;

}  // namespace xopt::sycl_device
