// The 16-bit floats as they lie in memory: types of their own, so that load and store know what they convert.
#pragma once

#include <cstdint>

#include "tiles/level.h"

namespace xopt::XOPT_ISA {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

}  // namespace xopt::XOPT_ISA
