// The list of kernels and the choice among them.
#include "runtime/registry.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

namespace xopt {
namespace {

// Filled while the library is loaded, by one thread; constant ever after.
KernelRecord* head = nullptr;

thread_local Offload* offload_of_thread = nullptr;

std::string missing_kernel(const char* name, const char* dtype) {
  std::map<std::string, std::string> levels_of;  // of each dtype under this name
  std::map<std::string, bool> names;
  for (const KernelRecord* record = head; record != nullptr; record = record->next) {
    names[record->name] = true;
    if (std::strcmp(record->name, name) != 0) continue;
    std::string& levels = levels_of[record->dtype];
    levels += (levels.empty() ? "" : " ") + std::string(isa_name(record->isa));
  }
  std::string message = std::string("no kernel '") + name + "' of dtype '" + dtype + "' at level " +
                        isa_name(active_isa()) + " or below; this build has ";
  if (levels_of.empty()) {
    message += "the kernels";
    for (const auto& entry : names) message += " " + entry.first;
    return message + (names.empty() ? " (none)" : "");
  }
  message += std::string("'") + name + "' for";
  for (const auto& entry : levels_of) message += " " + entry.first + " (" + entry.second + ")";
  return message;
}

}  // namespace

KernelRecord::KernelRecord(const char* name, const char* dtype, Isa isa, KernelFn fn)
    : name(name), dtype(dtype), isa(isa), fn(fn), calls(0), next(head) {
  head = this;
}

KernelRecord::KernelRecord(const char* name, const char* dtype, KernelFn fn, KernelRecord** list)
    : name(name), dtype(dtype), isa(Isa::scalar), fn(fn), calls(0), next(*list) {
  *list = this;
}

Offload* current_offload() { return offload_of_thread; }
void set_current_offload(Offload* offload) { offload_of_thread = offload; }

KernelRecord* first_kernel() { return head; }

KernelRecord* find_kernel(const char* name, const char* dtype) { return find_kernel(name, dtype, active_isa()); }

KernelRecord* find_kernel(const char* name, const char* dtype, Isa limit) {
  KernelRecord* best = nullptr;
  for (KernelRecord* record = head; record != nullptr; record = record->next) {
    if (record->isa > limit || (best != nullptr && best->isa >= record->isa)) continue;
    if (std::strcmp(record->name, name) == 0 && std::strcmp(record->dtype, dtype) == 0) best = record;
  }
  if (best == nullptr) throw std::runtime_error(missing_kernel(name, dtype));
  return best;
}

}  // namespace xopt
