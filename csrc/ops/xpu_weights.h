// Packed weights in a device's memory. Operators look at a weight's header in each call, and to read it from a device
// would make the host wait. So the host keeps the header of what it has moved there, for as long as that memory lives.
// The header of a copy that torch has made (clone) is read in each call.
#pragma once

#include <array>
#include <cstring>

#include "kernels/packed.h"
#include "ops/arguments.h"

namespace xopt::ops {

using HeaderBytes = std::array<uint8_t, sizeof(PackedHeader)>;

// What an operator has made on the host, in the place of the thread's operator. What is one run of bytes and at least as
// long as a header is taken for a packed weight.
Tensor moved_to_place(const Tensor& made);

// The first bytes of a packed weight, which has as many.
HeaderBytes header_bytes(const Tensor& packed);

// Of a tensor that is too short for one, an empty header.
template <class Header>
Header header_of(const Tensor& packed) {
  static_assert(sizeof(Header) == sizeof(HeaderBytes));
  Header header{};
  if (packed.size(0) < static_cast<int64_t>(sizeof(header))) return header;
  std::memcpy(&header, header_bytes(packed).data(), sizeof(header));
  return header;
}

}  // namespace xopt::ops
