// What a thread does between the products of a block: prefetches, the epilogue of the rows before, the copy of the rows
// that come next.
//
// A tile product keeps the matrix unit busy for 16 cycles and the rest of the core for one, so this work is nearly free
// there; done after the products, the epilogue has to wait for the last of them and for the tile stores before its
// first load. Blocks that multiply on the vector ports have nothing to gain; they finish the epilogue at once.
#pragma once

#include "kernels/gemm_plan.h"
#include "tiles/block.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {

// Lines of the next weights that a step fetches, of the two tiles which each of a chunk's row blocks has a share of. As few as
// that makes: places for lines on their way are few, and products wait where many are asked for at once.
XOPT_INLINE int64_t lines_ahead(int64_t row_blocks) { return ceil_div(2 * kTileBytes / 64, row_blocks); }

// All that a block on the vector ports lets happen: a call in its loop would cost it its registers.
class Prefetches {
 public:
  void clear() {
    end_ = streams_;
    steps_of_rows_ = 0;
  }
  bool empty() const { return end_ == streams_; }
  // Before those of rows.
  void add(const Prefetch& prefetch) { *end_++ = prefetch; }
  // The part of the epilogue's `other`, or of the output, that these rows read or write from a column on, over the steps
  // along k, or the first of them.
  void add_other(const Epilogue& e, int64_t row, int64_t rows, int64_t column, int64_t k_tiles) {
    if (e.binary == Binary::none || e.other_row_stride == 0) return;
    add_rows({e.other, e.other_dtype, 1, e.other_row_stride}, row, rows, column, k_tiles, false);
  }
  void add_output(const Epilogue& e, int64_t row, int64_t rows, int64_t column, int64_t k_tiles) {
    add_rows({e.out, e.out_dtype, 1, e.out_row_stride}, row, rows, column, k_tiles, true);
  }
  XOPT_INLINE void step() {
    if (empty()) return;
    for (Prefetch* stream = streams_; stream != end_; ++stream) stream->step();
    if (--steps_of_rows_ == 0) end_ = rows_;
  }

 private:
  void add_rows(const RowsView& view, int64_t row, int64_t rows, int64_t column, int64_t k_tiles, bool for_writing) {
    if (rows == 0) return;
    if (steps_of_rows_ == 0) rows_ = end_;
    const int64_t size = dtype_size(view.dtype), stride = view.row_stride * size;
    const int64_t lines = ceil_div(kPanelColumns * size, 64);
    const auto* first = static_cast<const uint8_t*>(view.data) + row * stride + column * size;
    const int64_t at_once = ceil_div(rows, k_tiles);
    steps_of_rows_ = ceil_div(rows, at_once);
    if (at_once == 1) {
      *end_++ = {first, stride, 64, lines, for_writing};
    } else {
      for (int64_t line = 0; line < lines; ++line) {
        *end_++ = {first + 64 * line, at_once * stride, stride, at_once, for_writing};
      }
    }
  }

  Prefetch streams_[7];  // weights twice, rows of A, and two lines of a row of floats twice
  Prefetch* end_ = streams_;
  Prefetch* rows_ = nullptr;   // those of the epilogue's rows, which come last
  int64_t steps_of_rows_ = 0;  // after which they have come to their end
};

// Rows to do, spread evenly over steps to come.
struct PacedRows {
  int64_t next = 0, rows = 0, steps = 1, debt = 0;

  void start(int64_t row_count, int64_t step_count) {
    next = 0;
    rows = row_count;
    steps = maximum<int64_t>(1, step_count);
    debt = 0;
  }
  bool pending() const { return next < rows; }
  // The rows up to which work is due after one more step.
  XOPT_INLINE int64_t due() {
    int64_t end = next;
    for (debt += rows; debt >= steps; debt -= steps) ++end;
    return minimum(end, rows);
  }
};

// One block of A on its way from the view into a copy.
template <class Block, class View>
struct BlockCopier {
  using A = typename Block::A;
  typename View::Rows source;  // at the row that comes next
  A* to;
  int32_t* row_sums;  // of int8 weights with zero points, else nullptr
  bool first_k;       // whether the block begins the sums
  int64_t rows, count, padded;

  // Rows [begin, end); they are asked for in their order.
  void copy_rows(int64_t begin, int64_t end) {
    const int64_t last = minimum(end, rows);
    if (begin < last) source.template copy<Block>(last - begin, count, padded, to + begin * Block::kStride);
    if constexpr (Block::kIsInt) {
      for (int64_t row = begin; row_sums != nullptr && row < last; ++row) {
        const int32_t sum = sum_run<Block>(to + row * Block::kStride, count);
        row_sums[row] = first_k ? sum : row_sums[row] + sum;
      }
    }
    for (int64_t row = maximum(begin, rows); row < end; ++row) {
      // Tiles always have all their rows: the missing ones are zeros, not what a former call left.
      __builtin_memset(to + row * Block::kStride, 0, static_cast<size_t>(padded) * sizeof(A));
    }
  }
};

// Of views whose rows stay where they are.
struct NothingToCopy {
  void copy_rows(int64_t, int64_t) {}
};
template <class Block, class View, bool InPlace = View::kInPlace>
struct CopierOf {
  using Type = BlockCopier<Block, View>;
};
template <class Block, class View>
struct CopierOf<Block, View, true> {
  using Type = NothingToCopy;
};

// Outputs whose rows follow each other as those of the sums do.
struct RowsInOrder {
  template <class Done>
  XOPT_INLINE void each(int64_t begin, int64_t end, const Done& done) const {
    done(row + begin, begin, end);
  }
  int64_t row = 0;  // of the product, that the strip's first is
};

// Copier: copy_rows(begin, end) for rows of a block of A. Outputs: which rows of the product a strip's rows are, where
// they are any: each(begin, end, done) calls done(row of the product, begin, end) for runs of them.
template <class Copier, class Outputs = RowsInOrder>
class Background {
 public:
  // `out_row_offset`: the output row that row 0 of epilogue.out is.
  explicit Background(EpilogueFn* epilogue, int64_t out_row_offset = 0)
      : epilogue_(epilogue), out_row_offset_(out_row_offset) {}

  Prefetches prefetches;

  // A strip whose sums are complete; they must stay untouched until it is finished, `steps` from now or at once if
  // the next strip comes earlier.
  void defer_epilogue(const GemmCall* call, const EpilogueStrip& strip, int64_t rows, int64_t steps,
                      const Outputs& outputs) {
    finish_epilogue();
    call_ = call;
    strip_ = strip;
    outputs_ = outputs;
    epilogue_rows_.start(rows, steps);
    // Where steps are few, as many as are finished with them.
    rows_at_once_ = maximum(kEpilogueRows, ceil_div(rows, epilogue_rows_.steps));
    interval_ = 256 * rows_at_once_ * epilogue_rows_.steps / rows;
  }
  void defer_copy(const Copier& copier, int64_t rows, int64_t steps) {
    copier_ = copier;
    copy_rows_.start(rows, steps);
  }

  // Before a block, when its prefetches are known.
  void begin_block() {
    each_step_ = !prefetches.empty() || copy_rows_.pending();
    until_epilogue_ = epilogue_rows_.pending() ? interval_ : kNever;
    countdown_ = each_step_ ? 0 : until_epilogue_;
  }
  // Called by a block for each step along k. Every instruction here costs a quarter of a cycle: tile products do not
  // hide them, as they are a matter of issuing, not of waiting.
  XOPT_INLINE void step() {
    countdown_ -= 256;
    if (countdown_ <= 0) work();
    asm volatile("" : : : "memory");  // GCC does not know that tile loads read memory
  }

  void finish_epilogue() { do_epilogue(epilogue_rows_.rows); }
  void finish_copy() {
    do_copy(copy_rows_.rows);
    asm volatile("" : : : "memory");
  }

 private:
  // Done at once: a call of the epilogue looks up what costs as much as some four rows do.
  static constexpr int64_t kEpilogueRows = 8;
  static constexpr int64_t kNever = int64_t{1} << 60;

  [[gnu::noinline]] void work() {
    if (!each_step_) {
      countdown_ = some_epilogue(countdown_);
      return;
    }
    prefetches.step();
    if (copy_rows_.pending()) do_copy(copy_rows_.due());
    until_epilogue_ -= 256;
    if (until_epilogue_ <= 0) until_epilogue_ = some_epilogue(until_epilogue_);
  }
  // The rows that are due; in how many 256ths of a step the next ones are.
  int64_t some_epilogue(int64_t late) {
    do_epilogue(minimum(epilogue_rows_.next + rows_at_once_, epilogue_rows_.rows));
    return epilogue_rows_.pending() ? late + interval_ : kNever;
  }
  void do_epilogue(int64_t end) {
    if (epilogue_rows_.next < end) {
      outputs_.each(epilogue_rows_.next, end, [this](int64_t row, int64_t first, int64_t last) {
        strip_.row = row - first;
        strip_.out_row = strip_.row - out_row_offset_;
        epilogue_(*call_, strip_, first, last);
      });
    }
    epilogue_rows_.next = end;
  }
  void do_copy(int64_t end) {
    if (copy_rows_.next < end) copier_.copy_rows(copy_rows_.next, end);
    copy_rows_.next = end;
  }

  EpilogueFn* epilogue_;
  int64_t out_row_offset_;
  Outputs outputs_{};
  const GemmCall* call_ = nullptr;
  EpilogueStrip strip_{};
  PacedRows epilogue_rows_;
  Copier copier_{};
  PacedRows copy_rows_;
  bool each_step_ = false;
  int64_t rows_at_once_ = 1;
  int64_t countdown_ = kNever, until_epilogue_ = kNever, interval_ = 0;  // in 256ths of a step
};

}  // namespace xopt::XOPT_ISA
