// A file of the program cache: what it was made from in full, and its content, with a checksum. A file that is cut off,
// damaged, of another format or of something else with the same name is never taken.
#pragma once

#include <optional>
#include <string>

namespace xopt::sycl_device {

enum class KeptState { absent, rejected, read };
struct Kept {
  KeptState state;
  std::string content;
};

// Where `key` is kept below `folder`.
std::string kept_path(const std::string& folder, const std::string& key);
Kept read_kept(const std::string& path, const std::string& key);
// Other processes see the old file or the whole new one. A folder that cannot be written to is no error.
void write_kept(const std::string& path, const std::string& key, const std::string& content);

}  // namespace xopt::sycl_device
