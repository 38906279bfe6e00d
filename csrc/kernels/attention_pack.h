// Keys and values as the panels that a block multiplies by (see packed.h), a block of keys at a time.
//
// For the scores a key is a column whose depth runs along k: tiles are 16 x 16 transposes of 4-byte units. For the
// product with the probabilities a key is a k and value columns are columns: rows of tiles are copied, or for 16-bit
// types interleaved two by two. Padding is zero.
#pragma once

#include <emmintrin.h>

#include "tiles/layout.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

inline constexpr int64_t kUnits = 16;  // of 4 bytes, in a row of a tile

// `from`: 16 rows of 64 bytes, `stride` bytes apart.
XOPT_INLINE void transpose_tile(const uint8_t* from, int64_t stride, uint8_t* to) {
  for (int64_t row = 0; row < kUnits; row += 4) {
    for (int64_t column = 0; column < kUnits; column += 4) {
      __m128i in[4];
      for (int64_t r = 0; r < 4; ++r) {
        in[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (row + r) * stride + column * 4));
      }
      const __m128i ab_low = _mm_unpacklo_epi32(in[0], in[1]), ab_high = _mm_unpackhi_epi32(in[0], in[1]);
      const __m128i cd_low = _mm_unpacklo_epi32(in[2], in[3]), cd_high = _mm_unpackhi_epi32(in[2], in[3]);
      const __m128i out[4] = {_mm_unpacklo_epi64(ab_low, cd_low), _mm_unpackhi_epi64(ab_low, cd_low),
                              _mm_unpacklo_epi64(ab_high, cd_high), _mm_unpackhi_epi64(ab_high, cd_high)};
      for (int64_t r = 0; r < 4; ++r) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (column + r) * 64 + row * 4), out[r]);
      }
    }
  }
}

// `row_bytes`: from one key to the next; `depth_bytes` of it belong to the key.
inline void pack_keys(const uint8_t* keys, int64_t row_bytes, int64_t count, int64_t depth_bytes, uint8_t* panels) {
  for (int64_t key = 0; key < round_up(count, kPanelColumns); key += kTileColumns) {
    const int64_t k_tiles = (depth_bytes + 63) / 64;
    uint8_t* to = panels + (key / kPanelColumns * k_tiles * 2 + key % kPanelColumns / kTileColumns) * kTileBytes;
    const int64_t rows = minimum(kTileColumns, count - key);
    for (int64_t k = 0; k < k_tiles; ++k, to += 2 * kTileBytes) {
      const int64_t bytes = minimum<int64_t>(64, depth_bytes - k * 64);
      const uint8_t* from = keys + key * row_bytes + k * 64;
      if (rows == kTileColumns && bytes == 64) {
        transpose_tile(from, row_bytes, to);
        continue;
      }
      alignas(64) uint8_t staged[kTileBytes] = {};
      for (int64_t row = 0; row < rows; ++row) copy_bytes(from + row * row_bytes, bytes, staged + row * 64);
      transpose_tile(staged, 64, to);
    }
  }
}

// The rows of a tile that one key (of 4 bytes a value) or two make: 16 columns of each.
XOPT_INLINE void pack_value_row(const uint8_t* first, const uint8_t* second, int64_t size, uint8_t* to) {
  if (size == 4) return copy_bytes(first, 64, to);
  for (int64_t half = 0; half < 2; ++half) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + half * 16));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + half * 16));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 32), _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 32 + 16), _mm_unpackhi_epi16(a, b));
  }
}

// `size`: bytes of a value; `panel_bytes`: from one panel to the next.
inline void pack_values(const uint8_t* values, int64_t row_bytes, int64_t count, int64_t columns, int64_t size,
                        int64_t panel_bytes, uint8_t* panels) {
  const int64_t group = 4 / size;
  const int64_t padded = round_up(count, kTileRows * group);
  for (int64_t column = 0; column < round_up(columns, kPanelColumns); column += kTileColumns) {
    const int64_t half = column % kPanelColumns / kTileColumns;
    uint8_t* to = panels + column / kPanelColumns * panel_bytes + half * kTileBytes;
    const int64_t bytes = maximum<int64_t>(0, minimum(kTileColumns, columns - column)) * size;
    for (int64_t key = 0; key < padded; key += group) {
      const int64_t row = key / group;
      uint8_t* target = to + row / kTileRows * 2 * kTileBytes + row % kTileRows * 64;
      const uint8_t* from = values + key * row_bytes + column * size;
      if (bytes == kTileColumns * size && key + group <= count) {
        pack_value_row(from, from + (group - 1) * row_bytes, size, target);
        continue;
      }
      alignas(64) uint8_t staged[2][64] = {};
      for (int64_t i = 0; i < group && bytes > 0 && key + i < count; ++i) {
        copy_bytes(from + i * row_bytes, bytes, staged[i]);
      }
      pack_value_row(staged[0], staged[group - 1], size, target);
    }
  }
}

}  // namespace xopt::XOPT_ISA
