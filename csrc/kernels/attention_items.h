// Attention as items, a head of keys x a range of row blocks each, whichever thread takes them.
//
// They are cut the same way for any number of threads as far as results could tell.
#pragma once

#include "kernels/attention_head.h"
#include "kernels/row_blocks.h"

namespace xopt::XOPT_ISA {

struct AttentionItems : RowBlocks {
  static constexpr int64_t kMostRows = 1024;  // of an item, on vectors: their sums stay in L2 or near it
  static constexpr int64_t kLeastRows = 128;  // fewer would pack keys and values for too little

  // `item_rows`: of an item at most.
  AttentionItems(const AttentionCall& attention, int64_t most_rows, bool even, int64_t item_rows = kMostRows)
      : RowBlocks(attention.queries * attention.group, most_rows, even),
        call(attention),
        threads(xopt::max_threads()),
        parts(ceil_div(rows, item_rows)) {
    const int64_t heads = call.batch * call.heads;
    if (heads % threads != 0 && heads < 4 * threads) {
      const int64_t balanced = minimum(ceil_div(4 * threads, heads), ceil_div(rows, kLeastRows));
      parts = maximum(parts, maximum(balanced, ceil_div(threads, heads)));
    }
    if (call.tuning.chunk_rows == TunedRows::half) parts *= 2;
    if (call.tuning.chunk_rows == TunedRows::twice) parts = ceil_div(parts, 2);
    parts = minimum(parts, row_blocks);
    items = heads * parts;
  }

  // Heads of the same rows follow each other: they lie side by side.
  template <class T>
  AttentionHead<T> head_of(int64_t item) const {
    return {call, item / (parts * call.heads), item % call.heads};
  }
  Range blocks_of(int64_t item) const { return share(row_blocks, parts, item / call.heads % parts); }
  Range rows_of_block(int64_t block) const { return {first_row(block), first_row(block + 1)}; }
  // That any row of them sees.
  KeyRange keys_of(Range blocks) const {
    const int64_t last_row = first_row(blocks.end) - 1;
    return keys_of_queries(call, first_row(blocks.begin) / call.group, last_row / call.group);
  }
  // The item that the thread which has this one will most likely take next.
  int64_t item_after(int64_t item) const { return minimum(item + 1, items - 1); }

  const AttentionCall& call;
  int64_t threads, parts, items = 0;  // parts of a head's row blocks
};

// The keys and values that will be packed next are fetched meanwhile, a share with each row block.
template <class T>
struct UpcomingRows {
  HeadRows<T> keys{}, values{};

  // Those of the item at hand from `key` on, or of the next one.
  void find(const AttentionItems& plan, int64_t item, int64_t key, int64_t most) {
    const AttentionHead<T> head = plan.template head_of<T>(key > 0 ? item : plan.item_after(item));
    keys = head.some_keys(key, most);
    values = head.some_values(key, most);
  }
};

}  // namespace xopt::XOPT_ISA
