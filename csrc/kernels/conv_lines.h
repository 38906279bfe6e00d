// Convolutions of few channels on a raster: a tile's row is a whole line of the kernel.
//
// Three channels fill a tenth of a tile's row, so a pixel of the raster is not one of the image but what a line of the
// kernel meets there: 7 x 3 channels for the stem of ResNet-50, of 32. The lines of the kernel are the steps along k.
// Against patches, each line of the image is laid out once, not once for each line of the kernel that meets it.
// The packed weight knows nothing of lines. It is small, and laid out anew in each call.
#pragma once

#include "kernels/conv_raster.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

struct KernelLines {
  explicit KernelLines(const ConvCall& call)
      : count(call.input.kernel[0] * call.input.kernel[1]),
        elements(call.input.kernel[2] * call.input.channels),
        tiles_of_line(ceil_div(elements, kTileK)) {}

  int64_t k_tiles() const { return count * tiles_of_line; }
  int64_t weight_bytes(const PackedWeight& weight) const { return weight.panels * k_tiles() * 2 * kTileBytes; }

  static constexpr int64_t kTileK = 32;
  int64_t count, elements, tiles_of_line;
};

// A packed bf16 weight whose lines begin with a tile each, at `to`.
inline PackedWeight with_whole_lines(const PackedWeight& weight, const KernelLines& lines, uint8_t* to) {
  PackedWeight result = weight;
  result.k_tiles = lines.k_tiles();
  result.k = result.k_tiles * KernelLines::kTileK;
  result.panel_bytes = result.k_tiles * 2 * kTileBytes;
  result.panel_data = to;
  __builtin_memset(to, 0, static_cast<size_t>(lines.weight_bytes(weight)));
  // Rows of a tile hold two elements along k of 16 columns, so where a line begins with an odd one, they change places.
  const auto row_of = [](auto* panel, int64_t tile_of_panel, int64_t row) {
    return panel + (row / kTileRows * 2 + tile_of_panel) * kTileBytes + row % kTileRows * 64;
  };
  for (int64_t panel = 0; panel < 2 * weight.panels; ++panel) {
    const uint8_t* from_panel = weight.panel_data + panel / 2 * weight.panel_bytes;
    uint8_t* to_panel = to + panel / 2 * result.panel_bytes;
    for (int64_t line = 0; line < lines.count; ++line) {
      for (int64_t element = 0; element < lines.elements; element += 2) {
        const int64_t k = line * lines.elements + element;
        const bool last = element + 1 == lines.elements;
        uint32_t first[kTileColumns], next[kTileColumns] = {};
        __builtin_memcpy(first, row_of(from_panel, panel % 2, k / 2), 64);
        if (k % 2 != 0 && !last) __builtin_memcpy(next, row_of(from_panel, panel % 2, k / 2 + 1), 64);
        uint32_t row[kTileColumns];
        for (int64_t i = 0; i < kTileColumns; ++i) {
          row[i] = k % 2 == 0 ? first[i] : (first[i] >> 16 | next[i] << 16);
          if (last) row[i] &= 0xffffU;
        }
        const int64_t at = line * lines.tiles_of_line * kTileRows + element / 2;
        __builtin_memcpy(row_of(to_panel, panel % 2, at), row, 64);
      }
    }
  }
  asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  return result;
}

// Whether a line of the kernel can be a row, and several rows of outputs share a line of the image. Asked before there
// is a plan, whose arithmetic most convolutions on patches need not pay for.
inline bool lines_fit(const ConvCall& call) {
  constexpr int64_t kMostWeightBytes = 128 << 10;
  const PatchesView& v = call.input;
  if (call.products != 1 || v.channels == 0 || v.dilation[2] != 1) return false;
  const KernelLines lines(call);
  return lines.count > v.stride[0] * v.stride[1] && lines.weight_bytes(call.weight) <= kMostWeightBytes;
}

template <class Block>
bool lines_chosen(const ConvCall& call, const RasterPlan<Block>& plan) {
  if (!plan.fits) return false;
  if (call.tuning.path != TunedPath::automatic) return call.tuning.path == TunedPath::raster;
  // In products of a row block with a panel: a patch costs one for each step, and five for the short copies of a line.
  const KernelLines lines(call);
  const int64_t panels = call.weight.panels;
  const int64_t patches = ceil_div(call.images * output_positions(call.input), Block::kRows);
  return plan.blocks * lines.k_tiles() * panels <= patches * (call.weight.k_tiles * (panels + 1) + 5 * lines.count);
}

template <class Block>
void conv_on_lines(const ConvCall& call, const RasterPlan<Block>& plan) {
  const KernelLines lines(call);
  const Scratch weight(static_cast<size_t>(lines.weight_bytes(call.weight)));
  ConvCall whole = call;
  whole.weight = with_whole_lines(call.weight, lines, weight.as<uint8_t>());
  conv_on_raster(whole, plan);
}

}  // namespace xopt::XOPT_ISA
#endif
