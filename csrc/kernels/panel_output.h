// A panel's sums on their way into output of bf16 (or of floats, as a norm wants its rows, and models whose residuals are
// floats), some rows at each step of the next panel's products, for the epilogues that are a few instructions
// (simple_epilogue.h). Sums are floats, or integers of a product of int8.
//
// Through the epilogue of the family a panel costs a call for each eight rows or more, and what such a call looks up: of
// 1024 x 640 x 640 on AMX a tenth of the time.
#pragma once

#include <type_traits>

#include "kernels/column_values.h"
#include "kernels/gemm_background.h"
#include "kernels/simple_epilogue.h"

namespace xopt::XOPT_ISA {

// What a panel's rows have in common, column by column: sums of floats are multiplied by a scale, and a bias is added.
template <class Acc>
struct PanelColumns {
  static constexpr int64_t kVectors = kPanelColumns / kWidth;
  static constexpr int64_t kBytes = 2 * kPanelColumns * 4;

  static void fill(const GemmCall& call, int64_t panel, uint8_t* to) {
    auto* values = reinterpret_cast<float*>(to);
    const int64_t n = call.weight.n, column = panel * kPanelColumns;
    ColumnValues::spread(call.epilogue.bias, n, column, kPanelColumns, values, 0.0F);
    ColumnValues::spread(call.epilogue.scale, n, column, kPanelColumns, values + kPanelColumns, 1.0F);
  }

  explicit PanelColumns(const uint8_t* from) {
    const auto* values = reinterpret_cast<const float*>(from);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      bias[v] = load(values + v * kWidth);
      scale[v] = load(values + kPanelColumns + v * kWidth);
    }
  }
  XOPT_INLINE F value(const float* sums, int64_t v) const { return fma(load(sums + v * kWidth), scale[v], bias[v]); }

  F bias[kVectors], scale[kVectors];
};

// From sums of int8, what the zero point of A has added to them is taken off first.
template <>
struct PanelColumns<int32_t> {
  static constexpr int64_t kVectors = kPanelColumns / kWidth;
  static constexpr int64_t kBytes = 3 * kPanelColumns * 4;

  static void fill(const GemmCall& call, int64_t panel, uint8_t* to) {
    const Epilogue& e = call.epilogue;
    const F row_scale = set1(*e.row_scale);
    const I zero_point = set1_int(e.row_zero_point != nullptr ? *e.row_zero_point : 0);
    auto* values = reinterpret_cast<float*>(to);
    auto* offsets = reinterpret_cast<int32_t*>(values + 2 * kPanelColumns);
    const int64_t column = panel * kPanelColumns;
    ColumnValues::spread(e.bias, call.weight.n, column, kPanelColumns, values, 0.0F);
    for (int64_t i = 0; i < kPanelColumns; i += kWidth) {
      store(values + kPanelColumns + i, mul(row_scale, load(call.weight.scale + column + i)));
      store_int(offsets + i, mul_int(zero_point, load_int(call.weight.column_sum + column + i)));
    }
  }

  explicit PanelColumns(const uint8_t* from) : of_floats(from) {
    const auto* offsets = reinterpret_cast<const int32_t*>(from) + 2 * kPanelColumns;
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) offset[v] = load_int(offsets + v * kWidth);
  }
  XOPT_INLINE F value(const int32_t* sums, int64_t v) const {
    return fma(to_float(sub_int(load_int(sums + v * kWidth), offset[v])), of_floats.scale[v], of_floats.bias[v]);
  }

  PanelColumns<float> of_floats;
  I offset[kVectors];
};

// From a panel that is finished to the one after it, in elements: what is fetched meanwhile, for writing and for reading;
// 0: nothing.
struct NextPanel {
  int64_t out = 0, other = 0;
};

// Rows of one panel. Outputs: which rows of the product they are (gemm_background.h).
template <class Acc, class Outputs>
class PanelFinish {
  static constexpr bool kInOrder = std::is_same_v<Outputs, RowsInOrder>;
  // Done at once: what they have in common costs as much as two or three of them.
  static constexpr int64_t kLeastRows = 8;
  static constexpr int64_t kVectors = kPanelColumns / kWidth;

 public:
  // What all panels share: `finish`, of the product's row 0 and column 0; its bias and scale are not looked at. `floats`: the
  // output, where it is of floats; then what is added may be, too.
  void begin(const Finish<Bf16>& finish, float* floats, const float* added_floats) {
    finish_ = finish;
    floats_ = floats;
    added_floats_ = added_floats;
    whole_panel_ = rows_for<WholeRow>();
    part_of_panel_ = rows_for<PartOfRow>();
  }

  // A panel whose sums are complete, the product's columns from `column` on; `common`: what PanelColumns tells of them.
  void start(const Acc* sums, const uint8_t* common, int64_t column, const Outputs& outputs, int64_t rows,
             NextPanel next_panel) {
    sums_ = sums;
    common_ = common;
    column_ = column;
    outputs_ = outputs;
    next_panel_ = next_panel;
    run_ = finish_.columns - column >= kPanelColumns ? whole_panel_ : part_of_panel_;
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
    explicit WholeRow(int64_t) {}
    template <class In>
    XOPT_INLINE F read(const In* p, int64_t v) const {
      return load(p + v * kWidth);
    }
    XOPT_INLINE void write(Bf16* p, const F (&x)[kVectors]) const {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; v += 2) store_two(p + v * kWidth, x[v], x[v + 1]);
    }
    XOPT_INLINE void write(float* p, const F (&x)[kVectors]) const {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) store(p + v * kWidth, x[v]);
    }
  };
  struct PartOfRow {
    explicit PartOfRow(int64_t columns) {
      for (int64_t v = 0; v < kVectors; ++v) {
        count[v] = maximum<int64_t>(0, minimum<int64_t>(kWidth, columns - v * kWidth));
      }
    }
    template <class In>
    XOPT_INLINE F read(const In* p, int64_t v) const {
      return load_part(p + v * kWidth, count[v]);
    }
    template <class Out>
    XOPT_INLINE void write(Out* p, const F (&x)[kVectors]) const {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) store_part(p + v * kWidth, x[v], count[v]);
    }
    int64_t count[kVectors];
  };

  XOPT_INLINE void some_rows(int64_t end) {
    if constexpr (kInOrder) {
      run_(*this, outputs_.row + next_, next_, end);
    } else {
      outputs_.each(next_, end, [this](int64_t row, int64_t first, int64_t last) { run_(*this, row, first, last); });
    }
    next_ = end;
  }

  // Rows of the panel that follow each other in the product from `row` on. Which of many ways they go is decided once: in
  // the loop of a block's products each branch costs, and more so the space that all ways would take there.
  using Rows = void(const PanelFinish& panel, int64_t row, int64_t first, int64_t last);

  enum class Clamp : uint8_t { none, low, both };

  template <class Columns>
  Rows* rows_for() const {
    if (floats_ != nullptr) {
      return added_floats_ != nullptr ? rows_with<Clamp::both, Columns, float, float>()
                                      : rows_with<Clamp::both, Columns, float, Bf16>();
    }
    if constexpr (std::is_same_v<Columns, WholeRow>) {
      // Most values have a lower limit at most; looking for an upper one takes a sixth of the time of all else.
      if (!finish_.clamps) return rows_with<Clamp::none, Columns, Bf16, Bf16>();
      if (finish_.high == std::numeric_limits<float>::infinity()) return rows_with<Clamp::low, Columns, Bf16, Bf16>();
    }
    return rows_with<Clamp::both, Columns, Bf16, Bf16>();
  }
  template <Clamp kClamp, class Columns, class Out, class Other>
  Rows* rows_with() const {
    if (finish_.other == nullptr) return &rows<kClamp, false, false, Columns, Out, Other>;
    constexpr bool kClampLast = kClamp != Clamp::none;
    return finish_.clamp_last ? &rows<kClamp, true, kClampLast, Columns, Out, Other>
                              : &rows<kClamp, true, false, Columns, Out, Other>;
  }

  // Of the product's row 0 and column 0.
  template <class Out>
  XOPT_INLINE Out* out() const {
    if constexpr (std::is_same_v<Out, float>) {
      return floats_;
    } else {
      return finish_.out;
    }
  }
  template <class Other>
  XOPT_INLINE const Other* other() const {
    if constexpr (std::is_same_v<Other, float>) {
      return added_floats_;
    } else {
      return finish_.other;
    }
  }

  template <Clamp kClamp, bool Adds, bool ClampLast, class Columns, class Out, class Other>
  static void rows(const PanelFinish& panel, int64_t row, int64_t first, int64_t last) {
    // In registers: as members, places would be written and read again for each row.
    const Finish<Bf16>& finish = panel.finish_;
    const int64_t out_stride = finish.out_stride, other_stride = finish.other_stride;
    const Columns columns(finish.columns - panel.column_);
    const PanelColumns<Acc> common(panel.common_);
    const F low = set1(finish.low), high = set1(finish.high);
    const Acc* sums = panel.sums_ + first * kPanelColumns;
    Out* out = panel.out<Out>() + row * out_stride + panel.column_;
    const Other* other = Adds ? panel.other<Other>() + row * other_stride + panel.column_ : nullptr;
    const NextPanel next = panel.next_panel_;
    for (int64_t i = first; i < last; ++i, sums += kPanelColumns, out += out_stride) {
      if (next.out != 0) fetch_for_writing(out + next.out);
      if constexpr (Adds) {
        if (next.other != 0) fetch_columns(other + next.other);
      }
      F x[kVectors];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        x[v] = common.value(sums, v);
        if constexpr (Adds && ClampLast) x[v] = add(x[v], columns.read(other, v));
        if constexpr (kClamp != Clamp::none) x[v] = max(low, x[v]);
        if constexpr (kClamp == Clamp::both) x[v] = min(high, x[v]);
        if constexpr (Adds && !ClampLast) x[v] = add(x[v], columns.read(other, v));
      }
      columns.write(out, x);
      if constexpr (Adds) other += other_stride;
    }
  }

  // Of a row of a panel.
  template <class Other>
  static XOPT_INLINE void fetch_columns(const Other* row) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Other));
#pragma GCC unroll 2
    for (int64_t i = 0; i < kPanelColumns; i += kLine) __builtin_prefetch(row + i);
  }

  Finish<Bf16> finish_;
  float* floats_ = nullptr;
  const float* added_floats_ = nullptr;
  const Acc* sums_ = nullptr;
  const uint8_t* common_ = nullptr;
  int64_t column_ = 0;
  Outputs outputs_{};
  int64_t next_ = 0, rows_ = 0, at_once_ = 0, steps_ = -1;
  NextPanel next_panel_;
  Rows *whole_panel_ = nullptr, *part_of_panel_ = nullptr, *run_ = nullptr;
};

// The panels of a thread's part, one after the other.
template <class Acc, class Outputs = RowsInOrder>
class PanelOutput {
 public:
  static constexpr int64_t kColumnBytes = PanelColumns<Acc>::kBytes;  // of a panel

  // Whether a call's panels are. What is added is of bf16, or of floats as the output is.
  static bool finishes(const GemmCall& call) {
    return finishes_simply(call, DType::bf16, DType::f32) || finishes_simply(call, DType::f32);
  }

  // Of a call whose panels are. `out_row_offset`: the product's row that is row 0 of its output.
  explicit PanelOutput(const GemmCall& call, int64_t out_row_offset = 0)
      : call_(call), out_row_offset_(out_row_offset) {}

  // Of these panels. `columns`: kColumnBytes for each, which must outlive the part.
  void begin(Range panels, uint8_t* columns) {
    first_panel_ = panels.begin;
    columns_ = columns;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel, columns += kColumnBytes) {
      PanelColumns<Acc>::fill(call_, panel, columns);
    }
    EpilogueStrip all{};
    all.columns = call_.weight.n;
    const Epilogue& e = call_.epilogue;
    float* floats = nullptr;
    if (e.out_dtype == DType::f32) floats = static_cast<float*>(e.out) - out_row_offset_ * e.out_row_stride;
    const bool adds_floats = e.binary == Binary::add && e.other_dtype == DType::f32;
    before_.begin(finish_of<Bf16>(e, all, 0, -out_row_offset_, 0), floats,
                  adds_floats ? static_cast<const float*>(e.other) : nullptr);
  }

  // What is fetched while a panel is finished, if the next one is so many rows and panels further. `fetches_out`: its output
  // too, which is of bf16.
  NextPanel next(int64_t rows, int64_t panels, bool fetches_out) const {
    const Epilogue& e = call_.epilogue;
    const int64_t columns = panels * kPanelColumns;
    return {fetches_out ? rows * e.out_row_stride + columns : 0,
            e.other_row_stride != 0 ? rows * e.other_row_stride + columns : 0};
  }

  // A block, between whose products the panel before is finished and what stands in the background is done; of a call with
  // places where outputs are a raster's.
  template <class Block, class Background>
  void run(int64_t rows, const BlockCall& call, Background& background) {
    before_.spread_over(call.k_tiles);
    Between<Background> between{before_, background};
    if constexpr (std::is_same_v<Outputs, RowsInOrder>) {
      Block::run(rows, call, between);
    } else {
      Block::run_places(rows, call, between);
    }
    before_.rest();
  }
  // A panel whose sums are complete, and stay untouched until the next one's are.
  void defer(const void* sums, const Outputs& outputs, int64_t rows, int64_t panel, NextPanel next = {}) {
    before_.start(static_cast<const Acc*>(sums), columns_ + (panel - first_panel_) * kColumnBytes,
                  panel * kPanelColumns, outputs, rows, next);
  }
  void finish() { before_.rest(); }

 private:
  // By reference: what has just been stored piece by piece, a copy would read in one piece. That waits until the stores
  // are done, behind those of the output.
  template <class Background>
  struct Between {
    PanelFinish<Acc, Outputs>& finish;
    Background& background;
    XOPT_INLINE void step() {
      finish.step();
      background.step();
    }
  };

  const GemmCall& call_;
  const int64_t out_row_offset_;
  PanelFinish<Acc, Outputs> before_;
  int64_t first_panel_ = 0;
  const uint8_t* columns_ = nullptr;
};

}  // namespace xopt::XOPT_ISA
