// See noted_call.h.
#include "ops/noted_call.h"

namespace xopt::ops {

CallNotes*& CallNotes::standing() {
  static thread_local CallNotes* notes = nullptr;
  return notes;
}

void NotedCall::add(const void* field, const void* value, int argument, int result) {
  const auto offset = static_cast<size_t>(static_cast<const uint8_t*>(field) - noted_);
  pointers.push_back({offset, value, argument, result, {}});
}

void NotedCall::reads(const PackedWeight& weight, const Tensor& packed) {
  reads(weight.panel_data, packed);
  reads(weight.scale, packed);
  reads(weight.column_sum, packed);
  reads(weight.zero_point, packed);
  PackedHeader header;
  std::memcpy(&header, packed.data(), sizeof(header));
  this->packed.push_back({packed.argument(), header});
}

}  // namespace xopt::ops
