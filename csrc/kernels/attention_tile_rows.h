// A row block of attention on tiles: its queries as tiles read them, what is known of its scores, its outputs.
#pragma once

#include "kernels/attention_head.h"
#include "kernels/attention_tile_plan.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
namespace xopt::XOPT_ISA {

// What steps look up, found once for each row block.
struct TileRows : BlockState<TilePlan::kRows> {
  void begin() {
    clear();
    is_guess = is_lost = false;
  }

  bool is_guess;  // 0 was taken for the largest of the first scores
  bool is_lost;   // the guess was so much larger than scores that their probabilities are nothing
  Range rows;
  KeyRange seen;  // by any of them
  KeyRange seen_by_all;
  const uint8_t* queries;  // as many rows as tiles have
  int64_t query_bytes;     // from one to the next
  float* sums;             // [panel][row][32]
};

struct PlacedRows {
  PlacedRows(const AttentionCall& call, Range wanted) : rows(wanted) {
    find_places(call, rows.begin, rows.size(), places);
  }
  Range rows;
  RowPlace places[TilePlan::kRows];
};

class TileRowsOfHead {
  static constexpr int64_t kRows = TilePlan::kRows, kSumValues = kRows * kPanelColumns;
  // Of a row's probabilities: smaller ones, times small values, would be nothing, though their quotient is something.
  static constexpr float kLeastOfGuess = 0x1p-60F;

 public:
  TileRowsOfHead(const TilePlan& plan, const AttentionHead<Bf16>& head) : plan_(plan), head_(head) {}

  // `copy`: room for queries, should tiles not read them where they are.
  void begin(int64_t block, float* sums, uint8_t* copy, TileRows* to) const {
    const PlacedRows placed(head_.call, plan_.rows_of_block(block));
    const int64_t first = placed.places[0].query, last = placed.places[placed.rows.size() - 1].query;
    to->begin();
    to->rows = placed.rows;
    to->seen = plan_.keys_of({block, block + 1});
    to->seen_by_all = {keys_of_queries(head_.call, last, last).begin, keys_of_queries(head_.call, first, first).end};
    to->magnitude = head_.magnitude_of_queries(placed.places, placed.rows.size());
    to->sums = sums;
    if (const uint8_t* in_place = queries_in_place(placed)) {
      to->queries = in_place;
      to->query_bytes = plan_.query_step;
    } else {
      copy_queries(placed, copy);
      to->queries = copy;
      to->query_bytes = plan_.query_bytes;
    }
  }

  // Sums divided by those of the probabilities, which are their last column.
  void write(TileRows* block) const {
    const PlacedRows placed(head_.call, block->rows);
    const int64_t rows = placed.rows.size(), depth = head_.call.value_depth;
    const float* sums = block->sums;
    const float* of_row = sums + depth / kPanelColumns * kSumValues + depth % kPanelColumns;
    alignas(64) float inverses[kRows];
    Bf16* outs[kRows];
    bool is_lost = false;
    for (int64_t row = 0; row < rows; ++row) {
      const float sum = of_row[row * kPanelColumns];
      const bool saw_some = block->largest[row] > -kInfinity;
      is_lost = is_lost || (saw_some && !(sum > kLeastOfGuess));
      inverses[row] = head_.inverse_of(placed.places[row], sum, block->largest[row]);
      outs[row] = head_.out(placed.places[row]);
    }
    block->is_lost = block->is_guess && is_lost;
    for (int64_t column = 0; column < depth; column += kPanelColumns, sums += kSumValues) {
      const int64_t count = minimum(kPanelColumns, depth - column);
      for (int64_t row = 0; row < rows; ++row) {
        write_scaled(sums + row * kPanelColumns, inverses[row], count, outs[row] + column);
      }
    }
  }
  void write_zeros(const TileRows& block) const {
    const PlacedRows placed(head_.call, block.rows);
    for (int64_t row = 0; row < placed.rows.size(); ++row) {
      __builtin_memset(head_.out(placed.places[row]), 0, static_cast<size_t>(head_.call.value_depth) * sizeof(Bf16));
    }
  }

 private:
  // Where the queries begin, if tiles can read them there: whole tiles of whole rows, which begin where lines of the cache
  // do. Else nullptr.
  const uint8_t* queries_in_place(const PlacedRows& placed) const {
    if (!plan_.reads_queries || placed.rows.size() != kRows) return nullptr;
    const auto* first = reinterpret_cast<const uint8_t*>(head_.queries(placed.places[0]));
    return reinterpret_cast<uintptr_t>(first) % 64 == 0 ? first : nullptr;
  }

  // Copies lie close together: at their own distance rows may meet in few sets of L1. Rows that are nobody's are zeros.
  void copy_queries(const PlacedRows& placed, uint8_t* to) const {
    const int64_t bytes = head_.call.depth * 2, padded = plan_.depth_tiles * 64, rows = placed.rows.size();
    for (int64_t row = 0; row < rows; ++row, to += plan_.query_bytes) {
      if (padded > bytes) __builtin_memset(to + padded - 64, 0, 64);
      copy_bytes(head_.queries(placed.places[row]), bytes, to);
    }
    for (int64_t row = rows; row < kRows; ++row, to += plan_.query_bytes) {
      __builtin_memset(to, 0, static_cast<size_t>(padded));
    }
  }

  const TilePlan& plan_;
  const AttentionHead<Bf16> head_;
};

}  // namespace xopt::XOPT_ISA
#endif
