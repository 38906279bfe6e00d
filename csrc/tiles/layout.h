// The shape of packed weights as tiles see it: panels of 32 columns, made of tiles of 16 columns and 16 rows of 64 bytes.
// kernels/packed.h says how a whole weight is made of them.
#pragma once

#include "tiles/types.h"

namespace xopt {

inline constexpr int64_t kPanelColumns = 32;
inline constexpr int64_t kTileColumns = 16;
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileBytes = 1024;

// Values of k that lie side by side for one column, and k values in a tile.
constexpr int64_t packed_group(DType dtype) { return 4 / dtype_size(dtype); }
constexpr int64_t packed_tile_k(DType dtype) { return kTileRows * packed_group(dtype); }
constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return ceil_div(value, multiple) * multiple; }

}  // namespace xopt
