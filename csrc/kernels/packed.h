// A packed weight: one plain run of bytes that describes itself, readable on every ISA level.
//
//   [ header, 64 bytes | panels | int8 only: scale f32[n_padded] | column sum s32[n_padded] | zero point s32[n_padded] ]
//
// A panel is 32 output columns (two tiles of 16), K running within it. A group of k values of one column lies side by
// side in 4 bytes (f32: 1, bf16 and f16: 2, int8: 4), 16 columns make a row of 64 bytes:
//
//   panels[n / 32][k / tile_k][2 tiles][16 rows][16 columns][group]     tile_k: f32 16, bf16 and f16 32, int8 64
//
// So a tile is 1 KB of contiguous memory that AMX loads as it is, a row of it is an operand of VNNI's and BF16's dot
// products, and a shift or mask makes two fp32 vectors of it. Padding (n to 32, k to tile_k) is zero.
// A gated pair has its two weights in one panel: tile 0 holds 16 columns of the gate, tile 1 the same 16 of `up`.
#pragma once

#include "tiles/layout.h"

namespace xopt {

struct PackedHeader {
  char magic[8];     // "xoptpack"
  uint16_t version;  // 1
  DType dtype;
  uint8_t gated;  // 0 or 1
  uint8_t has_zero_point;
  uint8_t reserved[11];
  int64_t n;      // output features (of one of the two, if gated)
  int64_t k;      // input features
  int64_t bytes;  // of the whole, header included
  uint8_t unused[12];
  uint32_t checksum;  // header_checksum: FNV-1a
};
static_assert(sizeof(PackedHeader) == 64);

// Panels hold n columns, or 16 of each of the two weights of a gated pair.
constexpr int64_t packed_panels(int64_t n, bool gated) {
  return gated ? (n + kTileColumns - 1) / kTileColumns : (n + kPanelColumns - 1) / kPanelColumns;
}
constexpr int64_t packed_panel_bytes(DType dtype, int64_t k) {
  return (k + packed_tile_k(dtype) - 1) / packed_tile_k(dtype) * 2 * kTileBytes;
}

// Of a header's 60 bytes before it.
uint32_t header_checksum(const void* header);
// Fills a header (checksum included); false where the sizes are negative or the total overflows.
bool packed_header_init(PackedHeader* header, DType dtype, int64_t n, int64_t k, bool gated, bool has_zero_point);
// nullptr if `data` (of `bytes` bytes) is a whole packed weight, else what is wrong with it, in words.
const char* packed_header_error(const void* data, int64_t bytes);

// Where the parts of a packed weight lie. Made from a checked header.
struct PackedWeight {
  explicit PackedWeight(const void* data);
  // `data`: with room for the header, which is not looked at.
  PackedWeight(const PackedHeader& header, const void* data);
  // Only `count` output columns from `first` on, which begins a panel: one of several weights packed side by side.
  [[nodiscard]] PackedWeight columns(int64_t first, int64_t count) const;
  // Whether tiles go along k from its end for this panel, as they do for every second one (BlockCall). Sums differ by that
  // in their last bits, so it must not depend on which of a matrix's columns a thread has been given.
  [[nodiscard]] bool goes_backwards(int64_t panel) const { return (first_panel + panel) % 2 == 1; }

  DType dtype;
  bool gated;
  int64_t n, k;
  int64_t panels;           // number of panels
  int64_t first_panel = 0;  // of the matrix that these are columns of
  int64_t panel_bytes;      // distance between panels
  int64_t k_tiles;          // tiles along k
  const uint8_t* panel_data;
  // int8 only, else nullptr; indexed by packed column: panel * 32 + column of the panel.
  const float* scale;
  const int32_t* column_sum;  // of the stored s8 values over k
  const int32_t* zero_point;  // nullptr if the weight has none
};

// ---- Packing and unpacking: plain functions, the same code on every level ------------------------------------------

// A matrix [n, k] with element strides.
struct MatrixView {
  const void* data;
  DType dtype;
  int64_t row_stride, column_stride;
};

struct PackCall {
  PackedHeader header;        // filled by packed_header_init
  MatrixView weight;          // f32, bf16 or f16 into a float pack (rounded to nearest even); s8 into an s8 pack
  MatrixView up;              // the second weight of a gated pair
  const float* scale;         // s8: n (or 2n if gated: gate then up) values
  const int32_t* zero_point;  // s8: likewise, or nullptr
  void* packed;               // header.bytes bytes
};
void pack_weight(const PackCall& call);

struct UnpackCall {
  const void* packed;
  void* weight;         // contiguous [n, k] of the packed dtype
  void* up;             // gated: the second weight
  float* scale;         // s8: n or 2n values, else nullptr
  int32_t* zero_point;  // s8: likewise (zeros if the weight has none)
};
void unpack_weight(const UnpackCall& call);

}  // namespace xopt
