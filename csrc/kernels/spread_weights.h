// Weights of depthwise convolutions and of narrow groups, out of a packed matrix into the order in which they are summed up:
// those of 16 output channels side by side, one after the other.
#pragma once

#include "kernels/conv.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// A row of the tile that holds 16 channels' weights: those of some positions that follow each other, side by side.
inline const uint8_t* tile_row(const PackedWeight& w, int64_t channel, int64_t row) {
  return w.panel_data + channel / kPanelColumns * w.panel_bytes + row / kTileRows * 2 * kTileBytes +
         channel % kPanelColumns / kTileColumns * kTileBytes + row % kTileRows * 64;
}

// The weights of 16 channels at all positions, one position after the other.
inline void spread_weights(const PackedWeight& w, int64_t channel, int64_t positions, int32_t* to) {
  constexpr int64_t kSideBySide = 4;
  for (int64_t position = 0; position < positions; ++position, to += kTileColumns) {
    const auto* row = reinterpret_cast<const int8_t*>(tile_row(w, channel, position / kSideBySide));
    for (int64_t i = 0; i < kTileColumns; ++i) {
      to[i] = row[kSideBySide * i + position % kSideBySide] - (w.zero_point != nullptr ? w.zero_point[channel + i] : 0);
    }
  }
}

// Of a row with two positions of bf16 or fp16 the one in the lower half of each pair, or in the upper one.
inline void spread_halves(DType dtype, const uint32_t* pairs, bool upper, float* to) {
  if (dtype == DType::bf16) {
    uint32_t bits[kTileColumns];
    for (int64_t i = 0; i < kTileColumns; ++i) bits[i] = upper ? pairs[i] & 0xffff0000U : pairs[i] << 16;
    __builtin_memcpy(to, bits, sizeof(bits));
    return;
  }
  F16 halves[kTileColumns];
  for (int64_t i = 0; i < kTileColumns; ++i) halves[i].bits = static_cast<uint16_t>(pairs[i] >> (upper ? 16 : 0));
  for (int64_t i = 0; i < kTileColumns; i += kWidth) store(to + i, load(halves + i));
}

inline void spread_weights(const PackedWeight& w, int64_t channel, int64_t positions, float* to) {
  if (w.dtype == DType::f32) {
    for (int64_t position = 0; position < positions; ++position, to += kTileColumns) {
      __builtin_memcpy(to, tile_row(w, channel, position), kTileColumns * sizeof(float));
    }
    return;
  }
  for (int64_t position = 0; position < positions; position += 2, to += 2 * kTileColumns) {
    uint32_t pairs[kTileColumns];
    __builtin_memcpy(pairs, tile_row(w, channel, position / 2), sizeof(pairs));
    spread_halves(w.dtype, pairs, false, to);
    if (position + 1 < positions) spread_halves(w.dtype, pairs, true, to + kTileColumns);
  }
}

// What 16 outputs of narrow groups multiply one of their group's channels by, or a pair of channels, at a position of the
// kernel: a row of the panel for each group, in which the other groups' outputs have zeros.
inline void own_weights(const ConvCall& call, int64_t output, int64_t position, int64_t channel, bool pairs,
                        float* to) {
  const PackedWeight& w = call.weight;
  const int64_t side_by_side = w.dtype == DType::f32 ? 1 : 2, groups = call.input.channels / call.group_in;
  const int64_t first = output % kPanelColumns / call.group_out;
  const int64_t end = minimum(groups, first + kTileColumns / call.group_out);
  uint32_t all[kTileColumns] = {};
  for (int64_t group = first; group < end; ++group) {
    const int64_t k = position * call.input.channels + group * call.group_in + channel;
    uint32_t row[kTileColumns];
    __builtin_memcpy(row, tile_row(w, output, k / side_by_side), sizeof(row));
    if (side_by_side == 2 && !pairs) spread_halves(w.dtype, row, k % 2 == 1, reinterpret_cast<float*>(row));
    for (int64_t i = 0; i < kTileColumns; ++i) all[i] |= row[i];
  }
  __builtin_memcpy(to, all, sizeof(all));
}

// For each line of the kernel, and each channel of a group or pair of them, those of all positions of the line.
inline void spread_narrow(const ConvCall& call, int64_t output, bool pairs, float* to) {
  const PatchesView& v = call.input;
  for (int64_t line = 0; line < v.kernel[0] * v.kernel[1]; ++line) {
    for (int64_t channel = 0; channel < call.group_in; channel += pairs ? 2 : 1) {
      for (int64_t place = 0; place < v.kernel[2]; ++place, to += kTileColumns) {
        own_weights(call, output, line * v.kernel[2] + place, channel, pairs, to);
      }
    }
  }
}

}  // namespace xopt::XOPT_ISA
