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

 public:
  PanelFinish() = default;
  // `finish`: with scales, of the panel's first column and the product's row 0. `ahead`: the output of a panel to come, of
  // as many rows, which is fetched for writing meanwhile, or nullptr.
  PanelFinish(const float* sums, const Finish<Bf16>& finish, const Outputs& outputs, int64_t rows, const Bf16* ahead)
      : sums_(sums), finish_(finish), outputs_(outputs), rows_(rows), ahead_(ahead) {}

  // All rows are done after so many steps.
  void spread_over(int64_t steps) { at_once_ = maximum(kLeastRows, ceil_div(rows_, maximum<int64_t>(1, steps))); }
  XOPT_INLINE void step() {
    if (next_ < rows_) some_rows(minimum(next_ + at_once_, rows_));
  }
  void rest() {
    if (next_ < rows_) some_rows(rows_);
  }

 private:
  static constexpr int64_t kVectors = kPanelColumns / kWidth;

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
    if (finish_.columns < kPanelColumns) return few_columns(row, first, last);
    if (finish_.other == nullptr) return all_columns<false, false>(row, first, last);
    if (finish_.clamp_last) return all_columns<true, true>(row, first, last);
    all_columns<true, false>(row, first, last);
  }

  template <bool Adds, bool ClampLast>
  XOPT_INLINE void all_columns(int64_t row, int64_t first, int64_t last) {
    const Finish<Bf16> f = finish_;  // in registers: as members, places would be written and read again for each row
    F bias[kVectors], scale[kVectors];
    load_columns(bias, scale);
    const F low = set1(f.low), high = set1(f.high);
    const float* sums = sums_ + first * kPanelColumns;
    Bf16* out = f.out + row * f.out_stride;
    const Bf16* other = Adds ? f.other + row * f.other_stride : nullptr;
    const Bf16* ahead = ahead_ != nullptr ? ahead_ + first * f.out_stride : nullptr;
    for (int64_t i = first; i < last; ++i, sums += kPanelColumns, out += f.out_stride) {
      if (ahead != nullptr) {
        asm volatile("prefetchw %0" : : "m"(*ahead));  // GCC's own only where told that the CPU has it
        ahead += f.out_stride;
      }
      F x[kVectors];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        x[v] = fma(load(sums + v * kWidth), scale[v], bias[v]);
        if constexpr (Adds && ClampLast) x[v] = add(x[v], load(other + v * kWidth));
        x[v] = min(high, max(low, x[v]));
        if constexpr (Adds && !ClampLast) x[v] = add(x[v], load(other + v * kWidth));
      }
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; v += 2) store_two(out + v * kWidth, x[v], x[v + 1]);
      if constexpr (Adds) other += f.other_stride;
    }
  }

  [[gnu::noinline]] void few_columns(int64_t row, int64_t first, int64_t last) const {
    Finish<Bf16> f = finish_;
    f.out += row * f.out_stride;
    f.other += row * f.other_stride;  // 0 where there is none
    const float* sums = sums_ + first * kPanelColumns;
    for (int64_t i = first; i < last; ++i, sums += kPanelColumns, f.out += f.out_stride, f.other += f.other_stride) {
      for (int64_t column = 0; column < f.columns; column += kWidth) {
        F x[1] = {load(sums + column)};
        finish_rows(f, column, x);
      }
    }
  }

  XOPT_INLINE void load_columns(F* bias, F* scale) const {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      bias[v] = load(finish_.bias + v * kWidth);
      scale[v] = load(finish_.scale + v * kWidth);
    }
  }

  const float* sums_ = nullptr;
  Finish<Bf16> finish_;
  Outputs outputs_{};
  int64_t next_ = 0, rows_ = 0, at_once_ = 0;
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
  }

  Bf16* place(int64_t row, int64_t panel) const {
    return static_cast<Bf16*>(e_.out) + row * e_.out_row_stride + panel * kPanelColumns;
  }

  // A block, between whose products the panel before is finished and what stands in the background is done.
  template <class Block, class Background>
  void run(int64_t rows, const BlockCall& call, Background& background) {
    Between<Background> between{before_, background};
    between.finish.spread_over(call.k_tiles);
    before_ = {};
    Block::run(rows, call, between);
    between.finish.rest();
  }
  // A panel whose sums are complete, and stay untouched until the next one's are. `ahead`: the output of one to come, of as
  // many rows, if it is to be fetched, or nullptr.
  void defer(const float* sums, const Outputs& outputs, int64_t rows, int64_t panel, const Bf16* ahead = nullptr) {
    EpilogueStrip strip{};
    strip.bias = columns_ + (panel - first_panel_) * 2 * kPanelColumns;
    strip.scale = strip.bias + kPanelColumns;
    strip.column = panel * kPanelColumns;
    strip.columns = minimum(kPanelColumns, n_ - strip.column);
    before_ = {sums, finish_of<Bf16>(e_, strip, 0, 0, 0), outputs, rows, ahead};
  }
  void finish() {
    before_.rest();
    before_ = {};
  }

 private:
  template <class Background>
  struct Between {
    PanelFinish<Outputs> finish;
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
