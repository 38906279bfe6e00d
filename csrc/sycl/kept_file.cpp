// See kept_file.h.
#include "sycl/kept_file.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace xopt::sycl_device {
namespace {

constexpr char kMagic[8] = {'x', 'o', 'p', 't', 's', 'y', 'c', '1'};

struct Header {
  char magic[8];
  uint64_t key_bytes, content_bytes, checksum;
};

// FNV-1a.
uint64_t hash(const std::string& text, uint64_t state = 0xCBF29CE484222325U) {
  for (const char c : text) state = (state ^ static_cast<uint8_t>(c)) * 0x100000001B3U;
  return state;
}

}  // namespace

std::string kept_path(const std::string& folder, const std::string& key) {
  char name[40];
  std::snprintf(name, sizeof(name), "%016llx%016llx", static_cast<unsigned long long>(hash(key)),
                static_cast<unsigned long long>(hash(key, 0x9E3779B97F4A7C15U)));
  return folder + "/" + name + ".bin";
}

Kept read_kept(const std::string& path, const std::string& key) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return {KeptState::absent, {}};
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  Header header{};
  if (bytes.size() < sizeof(header)) return {KeptState::rejected, {}};
  std::memcpy(&header, bytes.data(), sizeof(header));
  const bool whole = std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 && header.key_bytes == key.size() &&
                     header.content_bytes == bytes.size() - sizeof(header) - key.size();
  if (!whole || bytes.compare(sizeof(header), key.size(), key) != 0) return {KeptState::rejected, {}};
  std::string content = bytes.substr(sizeof(header) + key.size());
  if (hash(content) != header.checksum) return {KeptState::rejected, {}};
  return {KeptState::read, std::move(content)};
}

void write_kept(const std::string& path, const std::string& key, const std::string& content) {
  namespace files = std::filesystem;
  std::error_code error;
  files::create_directories(files::path(path).parent_path(), error);
  const std::string aside = path + "." + std::to_string(getpid());
  Header header{{}, key.size(), content.size(), hash(content)};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::ofstream file(aside, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  file.write(key.data(), static_cast<std::streamsize>(key.size()));
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (file) files::rename(aside, path, error);
  if (!file || error) files::remove(aside, error);
}

}  // namespace xopt::sycl_device
