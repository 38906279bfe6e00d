// See noted_call.h.
#include "ops/noted_call.h"

namespace xopt::ops {

CallNotes*& CallNotes::standing() {
  static thread_local CallNotes* notes = nullptr;
  return notes;
}

void NotedCall::add(const uint8_t* field, const void* value, int argument, int result) {
  pointers.push_back({static_cast<size_t>(field - noted_), value, argument, result, {}, {}});
}

void NotedCall::reads(const PackedWeight& weight, const Tensor& packed) {
  reads(weight.panel_data, packed);
  reads(weight.scale, packed);
  reads(weight.column_sum, packed);
  reads(weight.zero_point, packed);
  PackedHeader header;
  std::memcpy(&header, packed.data(), sizeof(header));
  this->packed.push_back({packed.argument(), header, 0});
}

}  // namespace xopt::ops
