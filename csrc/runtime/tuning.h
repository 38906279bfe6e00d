// What a call may do otherwise than its kernel's heuristics would: a plain argument of products, convolutions and
// attention. Zero leaves a choice to them. No choice changes what is computed, but for the order of additions.
// runtime/tuner.h finds out which choices pay.
#pragma once

#include <cstdint>

namespace xopt {

// Row blocks of a chunk, of what the heuristics would take; of an item of attention; outputs of a strip of a depthwise
// convolution.
enum class TunedRows : int8_t { automatic, half, twice };
// A thread's weights in L2 while its rows pass; with tiles `never`: k goes by slices, of which a panel's weights stay in L1.
enum class TunedStay : int8_t { automatic, never, always };
enum class TunedPath : int8_t { automatic, patches, raster };  // how a convolution reads its image

struct Tuning {
  int8_t level = -1;  // the record of the highest level up to this one; -1: up to the active level
  // Panels of 32 columns that stay in cache while the rows of a chunk pass: of weights, of attention's keys, of a
  // depthwise convolution's channels. What a kernel has no room for, it cuts to the most that it has.
  int16_t chunk_panels = 0;
  TunedRows chunk_rows = TunedRows::automatic;
  int16_t grid_rows = 0;  // into how many parts threads cut the rows; columns make up the rest, if they are cut at all
  TunedStay weights_stay = TunedStay::automatic;
  TunedPath path = TunedPath::automatic;
};

inline bool operator==(const Tuning& a, const Tuning& b) {
  return a.level == b.level && a.chunk_panels == b.chunk_panels && a.chunk_rows == b.chunk_rows &&
         a.grid_rows == b.grid_rows && a.weights_stay == b.weights_stay && a.path == b.path;
}

}  // namespace xopt
