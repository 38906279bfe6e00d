// Products with packed weights, for linear layers and convolutions, which differ in where the rows of A come from.
//
// A sub-group computes XOPT_TILES_M tiles of rows by the 32 columns of a panel; the sub-groups of a work-group have
// neighbouring panels and share a chunk of A in local memory, converted and padded with zeros, so that no product looks
// at a tail. Finished sums go through local memory to where each work-item has a column, and are stored from there.
//
// Build options: those of tile.h; XOPT_TILES_M, XOPT_SUBGROUPS (of a work-group), XOPT_CHUNK (k values staged at once).
#pragma once

#include <sycl/ext/oneapi/work_group_static.hpp>
#include <sycl/group_barrier.hpp>

#include "kernels/gemm.h"
#include "sycl/device/epilogue.h"
#include "sycl/device/tile.h"

namespace xopt::device {

constexpr int kRows = XOPT_TILES_M * kTileM;
constexpr int kTilesN = static_cast<int>(kPanelColumns) / kTileN;
constexpr int kSubGroups = XOPT_SUBGROUPS;
constexpr int kItems = kSubGroups * kLanes;
constexpr int kChunk = XOPT_CHUNK;
constexpr int kRowBytes = 64;  // of a packed tile
static_assert(kChunk % kPackedK == 0);

using Item = sycl::nd_item<3>;
inline Item this_item() { return sycl::ext::oneapi::this_work_item::get_nd_item<3>(); }
inline void barrier() { sycl::group_barrier(sycl::ext::oneapi::this_work_item::get_work_group<3>()); }

struct Local {
  Staged a[kRows * kChunk];
  Sum sums[kSubGroups][kRows * kPanelColumns];
  int32_t row_sums[kRows];
};

// ---- The rows of A -------------------------------------------------------------------------------------------------

// One row of a chunk, `count` elements from `from` on (or zeros), by all work-items.
inline void stage_run(const void* data, DType dtype, int64_t from, int count, int item, Staged* to) {
  for (int i = item; i < count; i += kItems) to[i] = staged(data, dtype, from + i);
}
inline void stage_zeros(int begin, int end, int item, Staged* to) {
  for (int i = begin + item; i < end; i += kItems) to[i] = Staged(0);
}

// ---- The way out --------------------------------------------------------------------------------------------------

inline void finish(const GemmCall& call, const OutPositions& positions, int64_t first_row, int64_t panel, int lane,
                   const Sum* sums, const int32_t* row_sums) {
  const Epilogue& e = call.epilogue;
  const bool apart = e.positions != nullptr;
  for (int tile = 0; tile < kPanelColumns / kLanes; ++tile) {
    const int place = tile * kLanes + lane;
    const Column<kIsInteger> column(call, panel, place);
    if (!column.exists) continue;
    for (int i = 0; i < kRows && first_row + i < call.m; ++i) {
      const int64_t row = first_row + i;
      const int64_t offset = apart ? position_offset(positions, row) : row * e.out_row_stride;
      const int64_t other = apart && e.other_row_stride != 0 ? offset : row * e.other_row_stride;
      column.store(sums + i * kPanelColumns + place, row, row_sums[i], offset, other);
    }
  }
}

// ---- The product ---------------------------------------------------------------------------------------------------

using Sums = TileSum[XOPT_TILES_M][kTilesN];

// A packed weight's panel, whose tiles are loaded from where they lie.
struct PackedPanel {
  const uint8_t* data;

  void prepare(int64_t) const {}
  void load(int64_t k, int column, TileB& to) const {
    const uint8_t* tile =
        data + (k / kPackedK * 2 + column / kTileColumns) * kTileBytes + k % kPackedK / kGroup * kRowBytes;
    to.load(reinterpret_cast<const Stored*>(tile) + column % kTileColumns * kGroup);
  }
};
struct PackedPanels {
  const PackedWeight& weight;
  PackedPanel panel(int64_t index, int, int) const { return {weight.panel_data + index * weight.panel_bytes}; }
};

// `panel`: prepares what it has at a depth before the tiles there are loaded.
template <class Panel>
inline void multiply_tiles(const Staged* a, const Panel& panel, int64_t first, int depth, Sums& sums) {
  for (int k = 0; k < depth; k += kTileK) {
    TileA rows[XOPT_TILES_M];
#pragma unroll
    for (int m = 0; m < XOPT_TILES_M; ++m) rows[m].load(a + m * kTileM * kChunk + k, kChunk);
    panel.prepare(first + k);
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      TileB columns;
      panel.load(first + k, n * kTileN, columns);
#pragma unroll
      for (int m = 0; m < XOPT_TILES_M; ++m) sums[m][n].add_product(rows[m], columns);
    }
  }
}

template <class Panel>
inline void multiply_chunk(const Staged* a, const Panel& panel, int64_t first, int depth, Sums& sums) {
#if XOPT_MATRIX
  multiply_tiles(a, panel, first, depth, sums);
#else
  // What lives across a barrier lives in memory: while a chunk is multiplied, sums are in registers.
  Sums mine;
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) mine[0][n] = sums[0][n];
  multiply_tiles(a, panel, first, depth, mine);
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) sums[0][n] = mine[0][n];
#endif
}

template <class Rows, class Panels>
inline void multiply(const Rows& rows, const Panels& panels, const GemmCall& call, const OutPositions& positions,
                     Local& local) {
  const Item item = this_item();
  const int id = static_cast<int>(item.get_local_id(2));
  const int sub_group = id / kLanes, lane_id = id % kLanes;
  const int64_t first_row = static_cast<int64_t>(item.get_group(1)) * kRows;
  const int64_t panel = static_cast<int64_t>(item.get_group(2)) * kSubGroups + sub_group;
  const bool works = panel < call.weight.panels;  // alike in a whole sub-group
  const auto panel_data = panels.panel(panel, sub_group, lane_id);
  const bool adds_rows = kIsInteger && call.weight.zero_point != nullptr;

  Sums sums;
#pragma unroll
  for (int m = 0; m < XOPT_TILES_M; ++m) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) sums[m][n].clear();
  }
  for (int row = id; row < kRows; row += kItems) local.row_sums[row] = 0;

  const int64_t depth = call.weight.k_tiles * kPackedK;
  for (int64_t first = 0; first < depth; first += kChunk) {
    const int padded = static_cast<int>(depth - first < kChunk ? depth - first : kChunk);
    for (int row = 0; row < kRows; ++row) {
      Staged* to = local.a + row * kChunk;
      if (first_row + row < call.m) {
        rows.stage(first_row + row, first, padded, id, to);
      } else {
        stage_zeros(0, padded, id, to);
      }
    }
    barrier();
    if (works) multiply_chunk(local.a, panel_data, first, padded, sums);
    if (adds_rows) {
      for (int row = id; row < kRows; row += kItems) {
        for (int k = 0; k < padded; ++k) local.row_sums[row] += static_cast<int32_t>(local.a[row * kChunk + k]);
      }
    }
    barrier();
  }

  if (works) {
#pragma unroll
    for (int m = 0; m < XOPT_TILES_M; ++m) {
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        sums[m][n].store(local.sums[sub_group] + m * kTileM * kPanelColumns + n * kTileN, kPanelColumns);
      }
    }
  }
  barrier();
  if (works) finish(call, positions, first_row, panel, lane_id, local.sums[sub_group], local.row_sums);
}

// group_local_memory crashes the device compiler of 2026.0.
syclexp::work_group_static<Local> local_memory;

}  // namespace xopt::device
