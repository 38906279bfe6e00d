// Keys and values as the panels that a block multiplies by (see packed.h), a block of keys at a time.
//
// For the scores a key is a column whose depth runs along k: tiles are 16 x 16 transposes of 4-byte units. For the
// product with the probabilities a key is a k and value columns are columns: rows of tiles are copied, or for 16-bit
// panels interleaved two by two. Padding is zero. A block that multiplies fp32 gets panels of fp32, whatever the
// tensors are: a value is converted once here, not by every row block.
#pragma once

#include "tiles/transpose.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// A row of a head as the elements To of a panel: `count` of them, at most 64 bytes.
template <class To, class T>
XOPT_INLINE void convert_row(const T* from, int64_t count, To* to) {
  if constexpr (sizeof(T) == sizeof(To)) {
    copy_bytes(from, count * static_cast<int64_t>(sizeof(T)), to);
  } else {
    convert_run<float>(from, count, to);
  }
}

// Rows of keys or values, `row_stride` elements apart.
template <class T>
struct HeadRows {
  const T* data;
  int64_t row_stride, count, columns;
};

// Rows from `first` to `last` into L2, long before they are packed: at a distance of a whole projection they are on
// pages of their own, where the hardware fetches nothing ahead.
template <class T>
XOPT_INLINE void prefetch_rows(const HeadRows<T>& rows, int64_t first, int64_t last) {
  const auto bytes = rows.columns * static_cast<int64_t>(sizeof(T));
  for (int64_t row = first; row < last; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(rows.data + row * rows.row_stride);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }
}

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512_BF16
// The largest magnitude; NaN counts as infinity.
inline float largest_magnitude(const HeadRows<Bf16>& rows) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t row = 0; row < rows.count; ++row) {
    const Bf16* from = rows.data + row * rows.row_stride;
    int64_t i = 0;
    for (; i + 32 <= rows.columns; i += 32) {
      most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(from + i), magnitude));
    }
    if (i == rows.columns) continue;
    const auto rest = static_cast<__mmask32>((1U << (rows.columns - i)) - 1);
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(rest, from + i), magnitude));
  }
  const __m512i odd = _mm512_srli_epi32(most, 16), even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
  const int bits = minimum(_mm512_reduce_max_epi32(_mm512_max_epi32(odd, even)), 0x7f80) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
#endif

template <class To, class T>
void pack_keys(const HeadRows<T>& keys, uint8_t* panels) {
  constexpr int64_t k_tile = 64 / static_cast<int64_t>(sizeof(To));
  const int64_t k_tiles = (keys.columns + k_tile - 1) / k_tile;
  for (int64_t key = 0; key < round_up(keys.count, kTileColumns); key += kTileColumns) {
    uint8_t* to = panels + (key / kPanelColumns * k_tiles * 2 + key % kPanelColumns / kTileColumns) * kTileBytes;
    const int64_t rows = minimum(kTileColumns, keys.count - key);
    for (int64_t k = 0; k < keys.columns; k += k_tile, to += 2 * kTileBytes) {
      const int64_t count = minimum(k_tile, keys.columns - k);
      const T* from = keys.data + key * keys.row_stride + k;
      if (sizeof(T) == sizeof(To) && rows == kTileColumns && count == k_tile) {
        transpose_tile(reinterpret_cast<const uint8_t*>(from), keys.row_stride * static_cast<int64_t>(sizeof(T)), to);
        continue;
      }
      alignas(64) To staged[kTileColumns * k_tile];
      if (rows < kTileColumns || count < k_tile) __builtin_memset(staged, 0, sizeof(staged));
      for (int64_t row = 0; row < rows; ++row) convert_row(from + row * keys.row_stride, count, staged + row * k_tile);
      transpose_tile(reinterpret_cast<const uint8_t*>(staged), 64, to);
    }
  }
}

// A row of a tile of 16-bit values: 16 columns of two keys, interleaved.
XOPT_INLINE void interleave(const void* first, const void* second, uint8_t* to) {
  for (int64_t half = 0; half < 2; ++half) {
    const __m128i a = _mm_loadu_si128(static_cast<const __m128i*>(first) + half);
    const __m128i b = _mm_loadu_si128(static_cast<const __m128i*>(second) + half);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 32), _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + half * 32 + 16), _mm_unpackhi_epi16(a, b));
  }
}

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// Rows of two tiles side by side: 32 columns of two keys.
XOPT_INLINE void interleave_panel(__m512i first, __m512i second, uint8_t* to) {
  const __m512i low = _mm512_unpacklo_epi16(first, second), high = _mm512_unpackhi_epi16(first, second);
  const __m512i left = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), right = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, left, high));
  _mm512_storeu_si512(to + kTileBytes, _mm512_permutex2var_epi64(low, right, high));
}

// 32 values of 16 bits of each of 32 keys, the tiles of a step along k, with zeros for columns and keys that do not exist.
// `one`: the column in which keys that do have a one of bf16, should it be among these.
template <class T>
XOPT_INLINE void pack_value_tiles(const HeadRows<T>& values, int64_t key, int64_t column, int64_t one, uint8_t* to) {
  const int64_t left = values.columns - column, place = one - column;
  const __mmask32 exists = left >= kPanelColumns ? ~0U : (1U << maximum<int64_t>(0, left)) - 1;
  const __m512i ones = _mm512_maskz_set1_epi16(place >= 0 && place < kPanelColumns ? 1U << place : 0, 0x3f80);
  const T* from = values.data + column;
  const auto row_of = [&](int64_t of_key) {
    if (of_key >= values.count) return _mm512_setzero_si512();
    return _mm512_or_si512(_mm512_maskz_loadu_epi16(exists, from + of_key * values.row_stride), ones);
  };
  for (int64_t row = 0; row < kTileRows; ++row) {
    interleave_panel(row_of(key + 2 * row), row_of(key + 2 * row + 1), to + row * 64);
  }
}
#endif

// The row of a tile that begins at (key, column), of one key (fp32 panels) or two.
template <class To, class T>
XOPT_INLINE void pack_value_row(const HeadRows<T>& values, int64_t key, int64_t column, uint8_t* to) {
  constexpr int64_t group = 4 / static_cast<int64_t>(sizeof(To));
  const T* from = values.data + key * values.row_stride + column;
  const int64_t count = minimum(kTileColumns, values.columns - column);
  const int64_t rows = maximum<int64_t>(0, minimum(group, values.count - key));
  if (count == kTileColumns && rows == group) {
    if constexpr (group == 1) return convert_row(from, kTileColumns, reinterpret_cast<To*>(to));
    if constexpr (group == 2) return interleave(from, from + values.row_stride, to);
  }
  alignas(64) To staged[2 * kTileColumns] = {};
  for (int64_t row = 0; row < rows; ++row) {
    convert_row(from + row * values.row_stride, count, staged + row * kTileColumns);
  }
  if constexpr (group == 1) return copy_bytes(staged, 64, to);
  interleave(staged, staged + kTileColumns, to);
}

// `panel_bytes`: from one panel to the next. `with_ones`: a column of ones follows (of bf16).
template <class To, class T>
void pack_values(const HeadRows<T>& values, int64_t panel_bytes, uint8_t* panels, bool with_ones = false) {
  constexpr int64_t group = 4 / static_cast<int64_t>(sizeof(To));
  const int64_t columns = values.columns + (with_ones ? 1 : 0);
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  if constexpr (sizeof(To) == 2 && sizeof(T) == 2) {
    for (int64_t key = 0; key < values.count; key += 2 * kTileRows, panels += 2 * kTileBytes) {
      for (int64_t column = 0; column < columns; column += kPanelColumns) {
        uint8_t* to = panels + column / kPanelColumns * panel_bytes;
        pack_value_tiles(values, key, column, with_ones ? values.columns : -1, to);
      }
    }
    return;
  }
#endif
  const int64_t padded = round_up(values.count, kTileRows * group);
  for (int64_t key = 0; key < padded; key += group) {
    const int64_t row = key / group;
    uint8_t* tile_row = panels + row / kTileRows * 2 * kTileBytes + row % kTileRows * 64;
    // The second half of a panel may be all padding; blocks of whole panels read it none the less.
    for (int64_t column = 0; column < round_up(columns, kPanelColumns); column += kTileColumns) {
      uint8_t* to =
          tile_row + column / kPanelColumns * panel_bytes + column % kPanelColumns / kTileColumns * kTileBytes;
      if (column < values.columns) {
        pack_value_row<To>(values, key, column, to);
      } else {
        __builtin_memset(to, 0, 64);
      }
    }
  }
}

}  // namespace xopt::XOPT_ISA
