// Weights of 8 or 4 bits under activations that stay floats: their layout, and the contracts of the kernels
// "gemm_weight_only" and "decode_weight" (dtypes f32, bf16 and f16: what is multiplied, which is the input's).
//
//   weight = (code - zero point) * scale     in fp32, then rounded to the dtype; scale and zero point are those of a
//                                            column and a group of k
//
//   [ header, 64 bytes | panels | scale f32[groups][n_padded] | if any, zero point s8[groups][n_padded] ]
//
// Codes are signed and lie in the order of a packed bf16 (kernels/packed.h), so that a row of a tile becomes a row of a
// tile: 32 values of k times 16 columns, each pair of k side by side in two bytes, or in the halves of one (the even k
// in the lower). Their padding is zero.
#pragma once

#include "kernels/gemm.h"

namespace xopt {

inline constexpr int64_t kCodedTileK = 32;  // groups are multiples of it, or all of k

struct WeightOnlyHeader {
  char magic[8];     // "xoptcode"
  uint16_t version;  // 1
  uint8_t bits;      // 8 or 4
  uint8_t gated;     // 0 or 1: two weights in one, as in a packed weight
  uint8_t has_zero_point;
  uint8_t reserved[3];
  int64_t n;      // output features (of one of the two, if gated)
  int64_t k;      // input features
  int64_t group;  // values of k that share a scale
  int64_t bytes;  // of the whole, header included
  uint8_t unused[12];
  uint32_t checksum;  // header_checksum
};
static_assert(sizeof(WeightOnlyHeader) == sizeof(PackedHeader));

constexpr int64_t coded_tile_bytes(int bits) { return kCodedTileK * kTileColumns * bits / 8; }

// Fills a header; false where a size is negative, the total overflows, or bits or group are not among those above.
bool weight_only_header_init(WeightOnlyHeader* header, int bits, int64_t n, int64_t k, int64_t group, bool gated,
                             bool has_zero_point);
// nullptr if `data` (of `bytes` bytes) is whole, else what is wrong with it, in words.
const char* weight_only_header_error(const void* data, int64_t bytes);

// Where its parts lie.
struct CodedWeight {
  // `data`: with room for the header, which is not looked at.
  CodedWeight(const WeightOnlyHeader& header, const void* data);

  int bits;
  int64_t n, k, group;
  int64_t panels, panel_bytes, k_tiles;  // tiles of kCodedTileK
  int64_t columns;                       // n_padded
  const uint8_t* codes;
  const float* scale;        // [groups][columns]
  const int8_t* zero_point;  // likewise, or nullptr
};

struct WeightOnlyPackCall {
  WeightOnlyHeader header;
  MatrixView weight;          // s8; if gated, the rows of the gate and then those of `up`
  const float* scale;         // [rows][groups], contiguous
  const int32_t* zero_point;  // likewise, or nullptr
  void* packed;
};
// False where a code or a zero point is beyond its bits; a zero point always has 8.
bool pack_weight_only(const WeightOnlyPackCall& call);

// Panels [first, first + count) as those of a packed weight.
struct DecodeCall {
  CodedWeight weight;
  int64_t first, count;
  void* panels;
};
using DecodeFn = void(const DecodeCall& call);

struct WeightOnlyCall {
  GemmCall gemm;  // of its weight all but the data, which it has none of
  CodedWeight codes;
};
using WeightOnlyFn = void(const WeightOnlyCall& call);

}  // namespace xopt
