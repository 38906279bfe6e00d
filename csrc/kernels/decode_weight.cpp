// Panels of codes become panels of floats. See weight_only.h.
// isa: scalar avx2 avx512
#include "kernels/weight_only.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kRow = 2 * kTileColumns;  // values of a row of a tile of pairs

// Of the columns of a tile, for each value of a row.
struct RowScales {
  float scale[kRow];
  float zero[kRow];

  void read(const CodedWeight& w, int64_t group, int64_t column) {
    const int64_t from = group * w.columns + column;
    for (int64_t i = 0; i < kTileColumns; ++i) {
      scale[2 * i] = scale[2 * i + 1] = w.scale[from + i];
      zero[2 * i] = zero[2 * i + 1] = w.zero_point == nullptr ? 0.0F : static_cast<float>(w.zero_point[from + i]);
    }
  }
};

XOPT_INLINE void spread_halves(const uint8_t* from, int8_t* to) {
  for (int64_t i = 0; i < kTileColumns; ++i) {
    to[2 * i] = static_cast<int8_t>(static_cast<int8_t>(from[i] << 4) >> 4);
    to[2 * i + 1] = static_cast<int8_t>(static_cast<int8_t>(from[i]) >> 4);
  }
}

// `rest`: how many values of k there still are; those behind are padding, and zero.
XOPT_INLINE void decode_row(const CodedWeight& w, const uint8_t* codes, const RowScales& scales, int64_t rest,
                            float* row) {
  int8_t spread[kRow];
  if (w.bits == 4) spread_halves(codes, spread);
  const auto* values = w.bits == 4 ? spread : reinterpret_cast<const int8_t*>(codes);
  for (int64_t i = 0; i < kRow; i += kWidth) {
    store(row + i, mul(sub(load(values + i), load(scales.zero + i)), load(scales.scale + i)));
  }
  for (int64_t i = 0; rest < 2 && i < kRow; ++i) row[i] = i % 2 < rest ? row[i] : 0.0F;
}

// `to`: the tile's first row; rows of a tile follow each other.
XOPT_INLINE void store_row(const float* row, int64_t pair, float* to) {
  // A tile of fp32 has half the depth, and its other half is in the tile behind that of the panel's other columns.
  constexpr int64_t kTile = kTileRows * kTileColumns;
  to += pair * 2 / kTileRows * 2 * kTile + pair * 2 % kTileRows * kTileColumns;
  for (int64_t i = 0; i < kRow; ++i) to[i % 2 * kTileColumns + i / 2] = row[i];
}
template <class T>
XOPT_INLINE void store_row(const float* row, int64_t pair, T* to) {
  for (int64_t i = 0; i < kRow; i += kWidth) store(to + pair * kRow + i, load(row + i));
}

// The first values of a tile of the packed layout.
template <class T>
T* tile_of(void* panel, int64_t k, int64_t half) {
  constexpr int64_t kTileK = kTileBytes / kTileColumns / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<T*>(static_cast<uint8_t*>(panel) + (k / kTileK * 2 + half) * kTileBytes);
}

template <class T>
void decode_panel(const CodedWeight& w, int64_t panel, void* to) {
  RowScales scales[2];
  const int64_t tile_bytes = coded_tile_bytes(w.bits), row_bytes = tile_bytes / kTileRows;
  const uint8_t* codes = w.codes + panel * w.panel_bytes;
  int64_t scaled = -1;  // the group that `scales` is of
  for (int64_t k = 0; k < w.k; k += kCodedTileK) {
    for (int64_t half = 0; half < 2 && k / w.group != scaled; ++half) {
      scales[half].read(w, k / w.group, panel * kPanelColumns + half * kTileColumns);
    }
    scaled = k / w.group;
    for (int64_t half = 0; half < 2; ++half, codes += tile_bytes) {
      T* tile = tile_of<T>(to, k, half);
      // Of fp32, the packed weight may end with the first 16 values of k.
      const bool ends_halfway = sizeof(T) == sizeof(float) && w.k - k <= kTileRows;
      const int64_t held = ends_halfway ? kTileRows / 2 : kTileRows;
      for (int64_t pair = 0; pair < held; ++pair) {
        float row[kRow];
        decode_row(w, codes + pair * row_bytes, scales[half], w.k - k - 2 * pair, row);
        store_row(row, pair, tile);
      }
    }
  }
}

template <class T>
void decode(const DecodeCall& call, DType dtype) {
  const int64_t bytes = packed_panel_bytes(dtype, call.weight.k);
  const int64_t threads = minimum<int64_t>(max_threads(), call.count);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int64_t i = call.count * thread / count; i < call.count * (thread + 1) / count; ++i) {
      decode_panel<T>(call.weight, call.first + i, static_cast<uint8_t*>(call.panels) + i * bytes);
    }
  });
}

void decode_f32(const DecodeCall& call) { decode<float>(call, DType::f32); }
void decode_bf16(const DecodeCall& call) { decode<Bf16>(call, DType::bf16); }
void decode_f16(const DecodeCall& call) { decode<F16>(call, DType::f16); }

}  // namespace

XOPT_REGISTER_KERNEL(decode_weight, f32, decode_f32);
XOPT_REGISTER_KERNEL(decode_weight, bf16, decode_bf16);
XOPT_REGISTER_KERNEL(decode_weight, f16, decode_f16);

}  // namespace xopt::XOPT_ISA
