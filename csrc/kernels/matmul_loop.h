// Products of many pairs of matrices: who computes what, in which order.
//
//   item        some columns of a pair's product x a range of its row blocks, whichever thread takes it
//    columns      of the right matrix, packed into panels that stay in L2 while the rows pass (as keys are for attention
//                 where the matrix is a transposed one, else as values); where the next item has the same, they stay
//     row block   as in the GEMM, whose thread does it
//
// Sums are never split along k, so results do not depend on the number of threads.
#pragma once

#include "kernels/attention_head.h"
#include "kernels/attention_pack.h"
#include "kernels/gemm_loop.h"
#include "kernels/matmul.h"
#include "tiles/columns.h"

namespace xopt::XOPT_ISA {

// The weight that the right matrix becomes, of columns that some item packs.
inline PackedWeight panels_to_be(const MatmulCall& call, DType dtype, int64_t columns, const void* panels) {
  PackedHeader header;
  packed_header_init(&header, dtype, columns, call.k, false, false);
  PackedWeight weight(header, panels);
  weight.panel_data = static_cast<const uint8_t*>(panels);
  return weight;
}

// Of the left matrices, whose rows are one distance apart.
inline RowsView left_rows(const MatmulCall& call, const void* data, DType dtype) {
  return {data, dtype, call.m, call.left.row_stride, 0};
}
inline bool has_rows(const MatmulCall& call) { return call.k <= 1 || call.left.column_stride == 1; }

template <class Block>
struct MatmulPlan {
  static constexpr int64_t kPanelBytes = 512 << 10;  // of a thread at once, which its L2 holds
  static constexpr int64_t kLeastRows = 128;         // of an item: fewer would pack the columns for too little
  static constexpr int64_t kItemsPerThread = 4;      // where pairs are few, so that no thread waits long for another

  // The dtypes of the matrices and of what panels hold.
  MatmulPlan(const MatmulCall& call, DType dtype, DType panel_dtype)
      : gemm(GemmCall{call.m,
                      has_rows(call) ? left_rows(call, call.left.data, dtype) : RowsView{},
                      panels_to_be(call, panel_dtype, call.n, nullptr),
                      {}}) {
    threads = xopt::max_threads();
    for (int64_t dim = 0; dim < call.dims; ++dim) pairs *= call.sizes[dim];
    const int64_t panels = ceil_div(call.n, kPanelColumns);
    panel_bytes = packed_panel_bytes(panel_dtype, call.k);
    column_parts = maximum<int64_t>(1, ceil_div(panels * panel_bytes, kPanelBytes));
    const int64_t wanted = kItemsPerThread * threads;
    if (pairs % threads != 0 && pairs * column_parts < wanted) {
      row_parts = minimum(ceil_div(wanted, pairs * column_parts), ceil_div(call.m, kLeastRows));
      column_parts = maximum(column_parts, ceil_div(wanted, pairs * row_parts));
    }
    row_parts = minimum(row_parts, gemm.row_blocks);
    part_panels = ceil_div(panels, minimum(column_parts, panels));
    column_parts = ceil_div(panels, part_panels);
    items = pairs * column_parts * row_parts;
  }

  GemmPlan<Block> gemm;
  int64_t threads, pairs = 1;
  int64_t panel_bytes, part_panels;  // of a part of the columns
  int64_t column_parts, row_parts = 1, items;
};

// T: how the dtype lies in memory.
template <class Block, class T>
class MatmulThread {
 public:
  // `alphas`: for each column of a part, or nullptr.
  MatmulThread(const MatmulCall& call, const MatmulPlan<Block>& plan, DType dtype, DType panel_dtype,
               EpilogueFn* epilogue, const float* alphas)
      : call_(call),
        plan_(plan),
        dtype_(dtype),
        panel_dtype_(panel_dtype),
        epilogue_(epilogue),
        alphas_(alphas),
        panels_(static_cast<size_t>(plan.part_panels * plan.panel_bytes)) {}

  // What takes an item's columns beyond the product itself.
  static GemmCall part_of(const MatmulCall& call, const PackedWeight& weight, const float* alphas) {
    GemmCall part{call.m, {}, weight, {}};
    Epilogue& e = part.epilogue;
    if (alphas != nullptr) e.scale = {alphas, DType::f32};
    e.binary = call.other.data == nullptr ? Binary::none : Binary::add;
    e.other_dtype = call.other_dtype;
    e.other_row_stride = call.other.row_stride;
    e.out_dtype = call.out_dtype;
    e.out_row_stride = call.n;
    return part;
  }

  void compute(int64_t item) {
    const int64_t row_part = item % plan_.row_parts, pair = item / plan_.row_parts % plan_.pairs;
    const int64_t first = item / plan_.row_parts / plan_.pairs * plan_.part_panels * kPanelColumns;
    const int64_t columns = minimum(plan_.part_panels * kPanelColumns, call_.n - first);
    pack(data_of<T>(call_.right, pair) + first * call_.right.column_stride, columns);

    GemmCall part = part_of(call_, panels_to_be(call_, panel_dtype_, columns, panels_.as<void>()), alphas_);
    part.weight.first_panel = first / kPanelColumns;
    Epilogue& e = part.epilogue;
    e.out = static_cast<uint8_t*>(call_.out) + (pair * call_.m * call_.n + first) * dtype_size(call_.out_dtype);
    if (call_.other.data != nullptr) {
      e.other =
          data_of<uint8_t>(call_.other, pair, dtype_size(call_.other_dtype)) + first * dtype_size(call_.other_dtype);
    }
    const T* left = data_of<T>(call_.left, pair);
    if (has_rows(call_)) {
      run(part, Merged(left_rows(call_, left, dtype_)), row_part);
    } else {
      run(part, Columns(left, dtype_, call_.left.column_stride), row_part);
    }
  }

 private:
  // The first value of a pair's matrix. `size`: elements of Value that one of the matrix's is.
  template <class Value>
  const Value* data_of(const MatrixBatch& matrices, int64_t pair, int64_t size = 1) const {
    int64_t offset = 0;
    for (int64_t dim = call_.dims - 1; dim >= 0; --dim) {
      offset += pair % call_.sizes[dim] * matrices.batch_strides[dim];
      pair /= call_.sizes[dim];
    }
    return static_cast<const Value*>(matrices.data) + offset * size;
  }

  void pack(const T* from, int64_t columns) {
    if (from == packed_ && columns == packed_columns_) return;
    packed_ = from;
    packed_columns_ = columns;
    if (call_.k == 0) return;
    using To = typename Block::A;
    auto* panels = panels_.as<uint8_t>();
    const MatrixBatch& right = call_.right;
    if (call_.n <= 1 || right.column_stride == 1) {
      pack_values<To>(HeadRows<T>{from, right.row_stride, call_.k, columns}, plan_.panel_bytes, panels);
      return;
    }
    const int64_t tiles = plan_.panel_bytes / (2 * kTileBytes), missing = columns % kPanelColumns;
    pack_keys<To>(HeadRows<T>{from, right.column_stride, columns, call_.k}, panels);
    if (missing == 0 || missing > kTileColumns) return;
    // The second half of the last panel is all padding; blocks read it none the less.
    uint8_t* half = panels + columns / kPanelColumns * plan_.panel_bytes + kTileBytes;
    for (int64_t tile = 0; tile < tiles; ++tile) __builtin_memset(half + tile * 2 * kTileBytes, 0, kTileBytes);
  }

  template <class View>
  void run(const GemmCall& part, const View& left, int64_t row_part) const {
    GemmThread<Block, View>(part, left, plan_.gemm, epilogue_, 0)
        .compute(share(plan_.gemm.row_blocks, plan_.row_parts, row_part), {0, part.weight.panels}, part.weight.panels);
  }

  const MatmulCall& call_;
  const MatmulPlan<Block>& plan_;
  const DType dtype_, panel_dtype_;  // of the matrices, and of what a block multiplies
  EpilogueFn* const epilogue_;
  const float* const alphas_;
  const Scratch panels_;
  const T* packed_ = nullptr;  // what the panels hold
  int64_t packed_columns_ = 0;
};

// PanelDType: what panels hold, which is fp32 where a block multiplies that.
template <class Block, class T, DType PanelDType>
void matmul_with(const MatmulCall& call, DType dtype) {
  const MatmulPlan<Block> plan(call, dtype, PanelDType);
  const int64_t columns = call.alpha == 1.0F ? 0 : plan.part_panels * kPanelColumns;
  const Scratch scratch(static_cast<size_t>(columns) * sizeof(float));
  auto* alphas = columns > 0 ? scratch.as<float>() : nullptr;
  for (int64_t i = 0; i < columns; ++i) alphas[i] = call.alpha;
  using Thread = MatmulThread<Block, T>;
  EpilogueFn* epilogue =
      select_epilogue<Block>(Thread::part_of(call, panels_to_be(call, PanelDType, call.n, nullptr), alphas));
  for_each_item(plan.items, plan.threads, [&] {
    return [thread = Thread(call, plan, dtype, PanelDType, epilogue, alphas)](int64_t item) mutable {
      thread.compute(item);
    };
  });
}

}  // namespace xopt::XOPT_ISA
