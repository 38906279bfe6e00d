// What output columns have in common, as the epilogue reads it: fp32, in the order of packed columns, whole panels.
#pragma once

#include "kernels/gemm_plan.h"
#include "tiles/any_dtype.h"

namespace xopt::XOPT_ISA {

class ColumnValues {
 public:
  // Of `panels` panels, the first of which begins at output column `column`; points the strip at them.
  void fill(const Epilogue& e, bool gated, int64_t n, int64_t column, int64_t panels, EpilogueStrip* strip) {
    const int64_t width = gated ? kTileColumns : kPanelColumns;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first = column + panel * width;
      float* to = bias_ + panel * kPanelColumns;
      spread(e.bias, n, first, width, to);
      if (gated) spread(e.up_bias, n, first, width, to + kTileColumns);
      if (e.scale.data != nullptr) spread(e.scale, n, first, width, scale_ + panel * kPanelColumns);
    }
    strip->bias = bias_;
    strip->scale = e.scale.data != nullptr ? scale_ : nullptr;
  }

  // Of `count` columns from `first` on, those that there are of all n.
  static void spread(const ColumnVector& values, int64_t n, int64_t first, int64_t count, float* to,
                     float missing = 0.0F) {
    for (int64_t i = 0; i < count; i += kWidth) {
      const bool inside = values.data != nullptr && first + i < n;
      store(to + i, inside ? load_any(values.data, values.dtype, first + i, n - first - i) : set1(missing));
    }
  }

 private:
  alignas(64) float bias_[kMostStripPanels * kPanelColumns];
  alignas(64) float scale_[kMostStripPanels * kPanelColumns];
};

// Finished sums as the epilogue takes them. A strip waits for its epilogue while the next one is computed.
template <class Block>
class Strips {
 public:
  // Of these panels, the sums of each after those of the last.
  EpilogueStrip next(const Epilogue& e, const PackedWeight& w, Range panels, void* acc) {
    const int64_t width = w.gated ? kTileColumns : kPanelColumns;
    EpilogueStrip strip{};
    strip.acc = acc;
    strip.acc_panel_stride = Block::kRows * kPanelColumns;
    strip.panel = panels.begin;
    strip.column = panels.begin * width;
    strip.columns = minimum(panels.size() * width, w.n - strip.column);
    turn_ ^= 1;
    values_[turn_].fill(e, w.gated, w.n, strip.column, panels.size(), &strip);
    return strip;
  }

 private:
  ColumnValues values_[2];
  int turn_ = 0;
};

}  // namespace xopt::XOPT_ISA
