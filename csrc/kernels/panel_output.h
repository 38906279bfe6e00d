// A panel's sums on their way into bf16 output, some rows at each step of the next panel's products, for the epilogues
// that are a few instructions (simple_epilogue.h).
//
// Through the epilogue of the family a panel costs a call for each eight rows or more, and what such a call looks up: of
// 1024 x 640 x 640 on AMX a tenth of the time.
#pragma once

#include <type_traits>

#include "kernels/column_values.h"
#include "kernels/gemm_background.h"
#include "kernels/simple_epilogue.h"

namespace xopt::XOPT_ISA {

// Rows of one panel. Outputs: which rows of the product they are (gemm_background.h).
template <class Outputs>
class PanelFinish {
  static constexpr bool kInOrder = std::is_same_v<Outputs, RowsInOrder>;
  // Done at once where rows have to be found: that costs as much as some of them do.
  static constexpr int64_t kLeastRows = kInOrder ? 1 : 8;
  static constexpr int64_t kVectors = kPanelColumns / kWidth;

 public:
  // What all panels have in common: `finish`, of the product's row 0 and column 0. Its bias and scale are not looked at.
  void begin(const Finish<Bf16>& finish) { finish_ = finish; }

  // A panel whose sums are complete, the product's columns from `column` on. `bias`: theirs, with their scales behind.
  // `ahead`: the output of a panel to come, of as many rows, which is fetched for writing meanwhile, or nullptr.
  void start(const float* sums, const float* bias, int64_t column, const Outputs& outputs, int64_t rows,
             const Bf16* ahead) {
    sums_ = sums;
    bias_ = bias;
    column_ = column;
    outputs_ = outputs;
    ahead_ = ahead;
    next_ = 0;
    rows_ = rows;
  }

  // All rows are done after so many steps.
  XOPT_INLINE void spread_over(int64_t steps) {
    if (steps == steps_) return;  // a division for each panel could be seen
    steps_ = steps;
    at_once_ = maximum(kLeastRows, ceil_div(kMostRows, maximum<int64_t>(1, steps)));
  }
  XOPT_INLINE void step() {
    if (next_ < rows_) some_rows(minimum(next_ + at_once_, rows_));
  }
  void rest() {
    if (next_ < rows_) some_rows(rows_);
  }

 private:
  static constexpr int64_t kMostRows = 2 * kTileRows;

  // Columns of a row: all of the panel's, or the first of them.
  struct WholeRow {
    XOPT_INLINE F read(const Bf16* p, int64_t v) const { return load(p + v * kWidth); }
    XOPT_INLINE void write(Bf16* p, const F (&x)[kVectors]) const {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; v += 2) store_two(p + v * kWidth, x[v], x[v + 1]);
    }
  };
  struct PartOfRow {
    explicit PartOfRow(int64_t columns) {
      for (int64_t v = 0; v < kVectors; ++v) {
        count[v] = maximum<int64_t>(0, minimum<int64_t>(kWidth, columns - v * kWidth));
      }
    }
    XOPT_INLINE F read(const Bf16* p, int64_t v) const { return load_part(p + v * kWidth, count[v]); }
    XOPT_INLINE void write(Bf16* p, const F (&x)[kVectors]) const {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) store_part(p + v * kWidth, x[v], count[v]);
    }
    int64_t count[kVectors];
  };

  XOPT_INLINE void some_rows(int64_t end) {
    if constexpr (kInOrder) {
      run(outputs_.row + next_, next_, end);  // in the block's own loop
    } else {
      outputs_.each(next_, end, [this](int64_t row, int64_t first, int64_t last) { run(row, first, last); });
    }
    next_ = end;
  }

  // Rows of the panel that follow each other in the product from `row` on.
  XOPT_INLINE void run(int64_t row, int64_t first, int64_t last) {
    if (finish_.columns - column_ < kPanelColumns) return part_of_rows(row, first, last);
    run_on(WholeRow{}, row, first, last);
  }
  [[gnu::noinline]] void part_of_rows(int64_t row, int64_t first, int64_t last) const {
    run_on(PartOfRow(finish_.columns - column_), row, first, last);
  }

  template <class Columns>
  XOPT_INLINE void run_on(const Columns& columns, int64_t row, int64_t first, int64_t last) const {
    if (finish_.other == nullptr) return rows<false, false>(columns, row, first, last);
    if (finish_.clamp_last) return rows<true, true>(columns, row, first, last);
    rows<true, false>(columns, row, first, last);
  }

  template <bool Adds, bool ClampLast, class Columns>
  XOPT_INLINE void rows(const Columns& columns, int64_t row, int64_t first, int64_t last) const {
    // In registers: as members, places would be written and read again for each row.
    const int64_t out_stride = finish_.out_stride, other_stride = finish_.other_stride;
    F bias[kVectors], scale[kVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      bias[v] = load(bias_ + v * kWidth);
      scale[v] = load(bias_ + kPanelColumns + v * kWidth);
    }
    const F low = set1(finish_.low), high = set1(finish_.high);
    const float* sums = sums_ + first * kPanelColumns;
    Bf16* out = finish_.out + row * out_stride + column_;
    const Bf16* other = Adds ? finish_.other + row * other_stride + column_ : nullptr;
    const Bf16* ahead = ahead_ != nullptr ? ahead_ + first * out_stride : nullptr;
    for (int64_t i = first; i < last; ++i, sums += kPanelColumns, out += out_stride) {
      if (ahead != nullptr) {
        asm volatile("prefetchw %0" : : "m"(*ahead));  // GCC's own only where told that the CPU has it
        ahead += out_stride;
      }
      F x[kVectors];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        x[v] = fma(load(sums + v * kWidth), scale[v], bias[v]);
        if constexpr (Adds && ClampLast) x[v] = add(x[v], columns.read(other, v));
        x[v] = min(high, max(low, x[v]));
        if constexpr (Adds && !ClampLast) x[v] = add(x[v], columns.read(other, v));
      }
      columns.write(out, x);
      if constexpr (Adds) other += other_stride;
    }
  }

  Finish<Bf16> finish_;
  const float *sums_ = nullptr, *bias_ = nullptr;
  int64_t column_ = 0;
  Outputs outputs_{};
  int64_t next_ = 0, rows_ = 0, at_once_ = 0, steps_ = -1;
  const Bf16* ahead_ = nullptr;
};

// The panels of a thread's part, one after the other.
template <class Outputs = RowsInOrder>
class PanelOutput {
 public:
  static constexpr int64_t kColumnBytes = 2 * kPanelColumns * 4;  // a panel's bias and scale
  // From the panel that is finished to the one whose output lines are fetched.
  static constexpr int64_t kPanelsAhead = 4;

  // Of a call that finishes_simply, in bf16.
  explicit PanelOutput(const GemmCall& call) : e_(call.epilogue), n_(call.weight.n) {}

  // Of these panels. `columns`: kColumnBytes for each, which must outlive the part.
  void begin(Range panels, float* columns) {
    first_panel_ = panels.begin;
    columns_ = columns;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel, columns += 2 * kPanelColumns) {
      ColumnValues::spread(e_.bias, n_, panel * kPanelColumns, kPanelColumns, columns, 0.0F);
      ColumnValues::spread(e_.scale, n_, panel * kPanelColumns, kPanelColumns, columns + kPanelColumns, 1.0F);
    }
    EpilogueStrip all{};
    all.columns = n_;
    before_.begin(finish_of<Bf16>(e_, all, 0, 0, 0));
  }

  Bf16* place(int64_t row, int64_t panel) const {
    return static_cast<Bf16*>(e_.out) + row * e_.out_row_stride + panel * kPanelColumns;
  }

  // A block, between whose products the panel before is finished and what stands in the background is done.
  template <class Block, class Background>
  void run(int64_t rows, const BlockCall& call, Background& background) {
    before_.spread_over(call.k_tiles);
    Between<Background> between{before_, background};
    Block::run(rows, call, between);
    before_.rest();
  }
  // A panel whose sums are complete, and stay untouched until the next one's are. `ahead`: the output of one to come, of as
  // many rows, if it is to be fetched, or nullptr.
  void defer(const float* sums, const Outputs& outputs, int64_t rows, int64_t panel, const Bf16* ahead = nullptr) {
    before_.start(sums, columns_ + (panel - first_panel_) * 2 * kPanelColumns, panel * kPanelColumns, outputs, rows,
                  ahead);
  }
  void finish() { before_.rest(); }

 private:
  // By reference: what has just been stored piece by piece, a copy would read in one piece. That waits until the stores
  // are done, behind those of the output.
  template <class Background>
  struct Between {
    PanelFinish<Outputs>& finish;
    Background& background;
    XOPT_INLINE void step() {
      finish.step();
      background.step();
    }
  };

  const Epilogue& e_;
  const int64_t n_;
  PanelFinish<Outputs> before_;
  int64_t first_panel_ = 0;
  const float* columns_ = nullptr;
};

}  // namespace xopt::XOPT_ISA
