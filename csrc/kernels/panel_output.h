// A panel's sums on their way into bf16 output, some rows at each step of the next panel's products, for the epilogues
// that are a few instructions (simple_epilogue.h).
//
// Through the epilogue of the family a panel costs a call for each eight rows or more, and what such a call looks up: of
// 1024 x 640 x 640 on AMX a tenth of the time.
#pragma once

#include "kernels/column_values.h"
#include "kernels/simple_epilogue.h"
#include "runtime/cpu.h"

namespace xopt::XOPT_ISA {

// Rows of one panel.
class PanelFinish {
 public:
  PanelFinish() = default;
  // `finish`: with scales, of the panel's first column and of the row of the first sums. `ahead`: the output of a panel to
  // come, of as many rows, which is fetched for writing meanwhile, or nullptr.
  PanelFinish(const float* sums, const Finish<Bf16>& finish, int64_t rows, const Bf16* ahead)
      : sums_(sums), finish_(finish), ahead_(ahead), left_(rows) {}

  // All rows are done after so many steps.
  void spread_over(int64_t steps) { at_once_ = ceil_div(left_, maximum<int64_t>(1, steps)); }
  XOPT_INLINE void step() {
    if (left_ > 0) some_rows(minimum(at_once_, left_));
  }
  void rest() {
    if (left_ > 0) some_rows(left_);
  }

 private:
  static constexpr int64_t kVectors = kPanelColumns / kWidth;

  XOPT_INLINE void some_rows(int64_t rows) {
    left_ -= rows;
    if (finish_.columns < kPanelColumns) return few_columns(rows);
    if (finish_.other == nullptr) return all_columns<false, false>(rows);
    if (finish_.clamp_last) return all_columns<true, true>(rows);
    all_columns<true, false>(rows);
  }

  // Places in registers: as members they would be written and read again for each row.
  template <bool Adds, bool ClampLast>
  XOPT_INLINE void all_columns(int64_t rows) {
    const Finish<Bf16> f = finish_;
    F bias[kVectors], scale[kVectors];
    load_columns(bias, scale);
    const F low = set1(f.low), high = set1(f.high);
    const float* sums = sums_;
    Bf16* out = f.out;
    const Bf16 *other = f.other, *ahead = ahead_;
    for (int64_t row = 0; row < rows; ++row, sums += kPanelColumns, out += f.out_stride, other += f.other_stride) {
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
    }
    sums_ = sums;
    finish_.out = out;
    finish_.other = other;
    ahead_ = ahead;
  }

  [[gnu::noinline]] void few_columns(int64_t rows) {
    const Finish<Bf16>& f = finish_;
    F bias[kVectors], scale[kVectors];
    load_columns(bias, scale);
    const F low = set1(f.low), high = set1(f.high);
    for (int64_t row = 0; row < rows; ++row, sums_ += kPanelColumns) {
      for (int64_t v = 0; v * kWidth < f.columns; ++v) {
        const int64_t count = minimum<int64_t>(kWidth, f.columns - v * kWidth);
        F x = fma(load(sums_ + v * kWidth), scale[v], bias[v]);
        const bool adds = f.other != nullptr;
        const F other = adds ? load_first(f.other + v * kWidth, count) : set1(0.0F);
        if (adds && f.clamp_last) x = add(x, other);
        x = min(high, max(low, x));
        if (adds && !f.clamp_last) x = add(x, other);
        store_first(f.out + v * kWidth, x, count);
      }
      finish_.out += f.out_stride;
      finish_.other += f.other_stride;  // 0 where there is none
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
  const Bf16* ahead_ = nullptr;
  int64_t left_ = 0, at_once_ = 0;
};

// The panels of a thread's part, one after the other.
class PanelOutput {
 public:
  static constexpr int64_t kColumnBytes = 2 * kPanelColumns * 4;  // a panel's bias and scale
  // From the panel that is finished to the one whose output lines are fetched.
  static constexpr int64_t kPanelsAhead = 4;

  PanelOutput(const Epilogue& epilogue, int64_t out_row_offset) : e_(epilogue), out_row_offset_(out_row_offset) {}

  // Of some of n columns' panels and so many rows. `columns`: kColumnBytes for each panel, which must outlive the part.
  void begin(int64_t n, Range panels, int64_t rows, float* columns) {
    n_ = n;
    first_panel_ = panels.begin;
    columns_ = columns;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel, columns += 2 * kPanelColumns) {
      ColumnValues::spread(e_.bias, n, panel * kPanelColumns, kPanelColumns, columns, 0.0F);
      ColumnValues::spread(e_.scale, n, panel * kPanelColumns, kPanelColumns, columns + kPanelColumns, 1.0F);
    }
    // Outputs that leave L2 have to come back to be written: 16 x 56 x 56 x 256 gained a fifth. What stays in L2 gains
    // nothing, and short sums lose a tenth.
    fetches_ = rows * panels.size() * kPanelColumns * 2 > l2_bytes();
  }

  Bf16* place(int64_t row, int64_t panel) const {
    return static_cast<Bf16*>(e_.out) + (row - out_row_offset_) * e_.out_row_stride + panel * kPanelColumns;
  }

  // The panel before, to be done within so many steps.
  PanelFinish before(int64_t steps) const {
    PanelFinish finish = before_;
    finish.spread_over(steps);
    return finish;
  }
  // A panel whose sums are complete, and stay untouched until the next one's are. `ahead`: the output of one to come, of as
  // many rows, or nullptr.
  void defer(const float* sums, int64_t row, int64_t rows, int64_t panel, const Bf16* ahead) {
    EpilogueStrip strip{};
    strip.bias = columns_ + (panel - first_panel_) * 2 * kPanelColumns;
    strip.scale = strip.bias + kPanelColumns;
    strip.column = panel * kPanelColumns;
    strip.columns = minimum(kPanelColumns, n_ - strip.column);
    const auto finish = finish_of<Bf16>(e_, strip, row, row - out_row_offset_, 0);
    before_ = PanelFinish(sums, finish, rows, fetches_ ? ahead : nullptr);
  }
  void finish() {
    before_.rest();
    before_ = {};
  }

  // What a block does between its products: this, and a copy.
  template <class Background>
  struct Between {
    PanelFinish finish;
    Background& background;
    XOPT_INLINE void step() {
      finish.step();
      background.step();
    }
  };

 private:
  const Epilogue& e_;
  const int64_t out_row_offset_;
  PanelFinish before_;
  int64_t n_ = 0, first_panel_ = 0;
  const float* columns_ = nullptr;
  bool fetches_ = false;
};

}  // namespace xopt::XOPT_ISA
