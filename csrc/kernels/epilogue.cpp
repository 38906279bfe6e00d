// The epilogues of the GEMM family. See epilogue.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A routine exists for each activation and each way out that is common (f32, bf16; the others share one that looks at
// the dtype for every vector), so the inner loop holds no decision but well predicted ones.
// Bias and scale come converted, two vectors are under way at a time, and 32 columns of bf16 go out as one cache line.
// With dtypes and tails looked at for each vector, an epilogue of 1024 x 2304 took 40% of the time of its products on
// AMX, and one with a gelu 80%.
#include "kernels/epilogue.h"

#include "kernels/each_activation.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

enum class Out { f32, bf16, any };

// Vectors of a tile's 16 columns.
constexpr int64_t kTileVectors = kTileColumns / kWidth;

constexpr int64_t kPanelVectors = 2 * kTileVectors;

// A panel's sums of floats as they are, with scale and bias. What its rows have in common stands in registers: with
// addresses and parameters looked up for each row, as the compiler has to where a store might have changed them, a row
// took 45 instructions.
struct PanelSums {
  PanelSums(const EpilogueStrip& strip, int64_t panel) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t column = panel * kPanelColumns + v * kWidth;
      bias[v] = load(strip.bias + column);
      scale[v] = strip.scale != nullptr ? load(strip.scale + column) : set1(1.0F);
    }
  }
  XOPT_INLINE F value(const float* sums, int64_t v) const { return fma(load(sums + v * kWidth), scale[v], bias[v]); }

  F bias[kPanelVectors], scale[kPanelVectors];
};

// The first columns of a row's finished values, in any dtype. One loop for all routines: unrolled in each, with a choice for
// each vector, it was half of what the compiler had to do here.
[[gnu::noinline]] void store_in_memory(const Epilogue& e, int64_t out, const F* x, int64_t columns) {
  const bool is_quantized = e.out_dtype == DType::s8 || e.out_dtype == DType::u8;
  for (int64_t column = 0; column < columns; column += kWidth, ++x) {
    F value = *x;
    if (is_quantized) {
      // Rounded before the zero point is added: it is the stored value that rounds to even.
      value = add(round_even(div(value, set1(e.out_scale))), set1(static_cast<float>(e.out_zero_point)));
    }
    store_any(e.out, e.out_dtype, out + column, value, columns - column);
  }
}

// A tile's worth of columns of one row, or two: finished values on their way out.
template <Out O, int64_t Vectors>
XOPT_INLINE void store_columns(const Epilogue& e, int64_t out, const F* x, int64_t columns) {
  if (O == Out::any || columns < Vectors * kWidth) {
    F copies[Vectors];  // what has an address does not stay in registers
#pragma GCC unroll 8
    for (int64_t v = 0; v < Vectors; ++v) copies[v] = x[v];
    return store_in_memory(e, out, copies, minimum(columns, Vectors * kWidth));
  }
  if constexpr (O == Out::bf16 && Vectors % 2 == 0) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < Vectors; v += 2) store_two(static_cast<Bf16*>(e.out) + out + v * kWidth, x[v], x[v + 1]);
  } else if constexpr (O == Out::bf16) {
    store(static_cast<Bf16*>(e.out) + out, x[0]);
  } else {
#pragma GCC unroll 8
    for (int64_t v = 0; v < Vectors; ++v) store(static_cast<float*>(e.out) + out + v * kWidth, x[v]);
  }
}

// Goes down the rows of the output.
class OutRows {
 public:
  OutRows(const Epilogue& e, int64_t row) : positions_(e.positions) {
    if (positions_ == nullptr) {
      next_ = row * e.out_row_stride;
      step_ = e.out_row_stride;
      return;
    }
    for (int i = 2; i >= 0; --i) {
      at_[i] = row % positions_->size[i];
      row /= positions_->size[i];
      next_ += at_[i] * positions_->stride[i];
    }
    next_ += row * positions_->image_stride;
    step_ = positions_->stride[2];
    left_ = positions_->size[2] - at_[2];
  }

  // The place of a row's first element; the next row comes next.
  XOPT_INLINE int64_t next() {
    const int64_t place = next_;
    next_ += step_;
    if (--left_ == 0) begin_line();
    return place;
  }

 private:
  void begin_line() {
    const OutPositions& p = *positions_;
    left_ = p.size[2];
    next_ += p.stride[1] - p.size[2] * p.stride[2];
    if (++at_[1] < p.size[1]) return;
    at_[1] = 0;
    next_ += p.stride[0] - p.size[1] * p.stride[1];
    if (++at_[0] < p.size[0]) return;
    at_[0] = 0;
    next_ += p.image_stride - p.size[0] * p.stride[0];
  }

  const OutPositions* positions_;
  int64_t next_ = 0, step_ = 0, left_ = INT64_MAX;
  int64_t at_[3] = {0, 0, 0};
};

enum class Other { none, given };

// The first columns of what a row is combined with, of any dtype.
[[gnu::noinline]] void load_in_memory(const Epilogue& e, int64_t index, int64_t columns, F* y) {
  for (int64_t v = 0; v < kPanelVectors; ++v) {
    const int64_t left = columns - v * kWidth;
    y[v] = left > 0 ? load_any(e.other, e.other_dtype, index + v * kWidth, left) : set1(0.0F);
  }
}

// What a row of a panel is combined with. Said once for the row: looked at for each vector, dtypes and tails cost more
// than the rest of the row.
XOPT_INLINE void load_other(const Epilogue& e, int64_t index, int64_t columns, F* y) {
  if (columns >= kPanelColumns && e.other_dtype == DType::bf16) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kPanelVectors; ++v) y[v] = load(static_cast<const Bf16*>(e.other) + index + v * kWidth);
    return;
  }
  F loaded[kPanelVectors];
  load_in_memory(e, index, columns, loaded);
#pragma GCC unroll 8
  for (int64_t v = 0; v < kPanelVectors; ++v) y[v] = loaded[v];
}

XOPT_INLINE void combine(Binary binary, const F* y, F* x) {
#pragma GCC unroll 8
  for (int64_t v = 0; v < kPanelVectors; ++v) x[v] = binary == Binary::add ? add(x[v], y[v]) : mul(x[v], y[v]);
}

// Rows of one panel; `rows` is at the first of them.
template <Activation A, Out O, Other B>
XOPT_INLINE void finish_panel(const GemmCall& call, const EpilogueStrip& strip, OutRows rows, int64_t panel,
                              int64_t begin, int64_t end) {
  const Epilogue& e = call.epilogue;
  const int64_t first = panel * kPanelColumns, columns = strip.columns - first;
  const int64_t other_stride = e.other_row_stride;
  const Binary binary = e.binary;
  const bool activation_last = e.activation_last;
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  const PanelSums panel_sums(strip, panel);
  const float* sums = static_cast<const float*>(strip.acc) + panel * strip.acc_panel_stride + begin * kPanelColumns;
  for (int64_t row = begin; row < end; ++row, sums += kPanelColumns) {
    const int64_t out = rows.next() + strip.column + first;
    const int64_t other = e.positions != nullptr ? out : (strip.row + row) * other_stride + strip.column + first;
    F x[kPanelVectors];
#pragma GCC unroll 8
    for (int64_t v = 0; v < kPanelVectors; ++v) x[v] = panel_sums.value(sums, v);
    F y[kPanelVectors];
    if constexpr (B == Other::given) {
      load_other(e, other, columns, y);
      // One activation for both orders; with one in each there was twice the code.
      if (activation_last) combine(binary, y, x);
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < kPanelVectors; ++v) x[v] = activate<A, O == Out::bf16>(x[v], alpha, beta);
    if constexpr (B == Other::given) {
      if (!activation_last) combine(binary, y, x);
    }
    store_columns<O, kPanelVectors>(e, out, x, columns);
  }
}

// Several panels are done row by row, so that a row of the output is written in one go.
template <Activation A, Out O, Other B>
void finish_rows(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end) {
  const int64_t at_once = strip.columns <= kPanelColumns ? end - begin : 1;
  OutRows rows(call.epilogue, strip.out_row + begin);
  for (int64_t row = begin; row < end; row += at_once, rows.next()) {
    for (int64_t panel = 0; panel * kPanelColumns < strip.columns; ++panel) {
      finish_panel<A, O, B>(call, strip, rows, panel, row, row + at_once);
    }
  }
}

// act(gate) * up: a panel holds 16 columns of each.
template <Activation A, Out O>
void finish_gated_rows(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end) {
  const Epilogue& e = call.epilogue;
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  for (int64_t panel = 0; panel * kTileColumns < strip.columns; ++panel) {
    const PanelSums panel_sums(strip, panel);
    const float* sums = static_cast<const float*>(strip.acc) + panel * strip.acc_panel_stride + begin * kPanelColumns;
    for (int64_t row = begin; row < end; ++row, sums += kPanelColumns) {
      const int64_t first = panel * kTileColumns, out = (strip.out_row + row) * e.out_row_stride + strip.column + first;
      F x[kTileVectors];
#pragma GCC unroll 8
      for (int64_t v = 0; v < kTileVectors; ++v) {
        const F gate = activate<A, O == Out::bf16>(panel_sums.value(sums, v), alpha, beta);
        x[v] = mul(gate, panel_sums.value(sums, kTileVectors + v));
      }
      store_columns<O, kTileVectors>(e, out, x, strip.columns - first);
    }
  }
}

template <Activation A, Out O>
EpilogueFn* select_kind(const GemmCall& call) {
  if (call.weight.gated) return finish_gated_rows<A, O>;
  return call.epilogue.binary == Binary::none ? finish_rows<A, O, Other::none> : finish_rows<A, O, Other::given>;
}

template <Activation A>
EpilogueFn* select_out(const GemmCall& call) {
  switch (call.epilogue.out_dtype) {
    case DType::f32:
      return select_kind<A, Out::f32>(call);
    case DType::bf16:
      return select_kind<A, Out::bf16>(call);
    default:
      return select_kind<A, Out::any>(call);
  }
}

void select_f32(const GemmCall& call, EpilogueFn** chosen) {
  switch (call.epilogue.activation) {
#define XOPT_ACTIVATION(NAME)                     \
  case Activation::NAME:                          \
    *chosen = select_out<Activation::NAME>(call); \
    return;
    XOPT_EACH_ACTIVATION(XOPT_ACTIVATION)
#undef XOPT_ACTIVATION
  }
}

// Rows of a panel's sums of int8 as real numbers, with the bias, in place of the sums.
XOPT_INLINE void to_real_numbers(const GemmCall& call, const EpilogueStrip& strip, int64_t panel, int64_t begin,
                                 int64_t end) {
  const Epilogue& e = call.epilogue;
  const PackedWeight& w = call.weight;
  const bool has_zero_points = w.zero_point != nullptr;
  F bias[kPanelVectors], scale[kPanelVectors];
  I column_sum[kPanelVectors], zero_point[kPanelVectors];
#pragma GCC unroll 8
  for (int64_t v = 0; v < kPanelVectors; ++v) {
    const int64_t column = panel * kPanelColumns + v * kWidth, packed = strip.panel * kPanelColumns + column;
    bias[v] = load(strip.bias + column);
    scale[v] = load(w.scale + packed);
    column_sum[v] = load_int(w.column_sum + packed);
    zero_point[v] = has_zero_points ? load_int(w.zero_point + packed) : set1_int(0);
  }
  auto* const sums = static_cast<int32_t*>(strip.acc) + panel * strip.acc_panel_stride;
  auto* const reals = static_cast<float*>(strip.acc) + panel * strip.acc_panel_stride;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out_row = strip.row + row;
    int32_t a_zero = strip.a_offset, rest = 0;
    if (e.row_zero_point != nullptr) a_zero += e.row_zero_point[e.row_zero_point_per_row ? out_row : 0];
    if (has_zero_points) {
      // sum (a - a0)(b - b0) = acc - a0 sum(b) - b0 (sum(a) - k a0), with the a and a0 of before the offset.
      const auto k_a_zero = static_cast<uint32_t>(w.k) * static_cast<uint32_t>(a_zero - strip.a_offset);
      rest = static_cast<int32_t>(static_cast<uint32_t>(strip.row_sums[row]) - k_a_zero);
    }
    const F row_scale = set1(e.row_scale[e.row_scale_per_row ? out_row : 0]);
#pragma GCC unroll 8
    for (int64_t v = 0; v < kPanelVectors; ++v) {
      const int64_t at = row * kPanelColumns + v * kWidth;
      I acc = load_int(sums + at);
      if (a_zero != 0) acc = sub_int(acc, mul_int(set1_int(a_zero), column_sum[v]));
      if (has_zero_points) acc = sub_int(acc, mul_int(set1_int(rest), zero_point[v]));
      store(reals + at, fma(to_float(acc), mul(row_scale, scale[v]), bias[v]));
    }
  }
}

alignas(64) constexpr float kNoBias[kMostStripPanels * kPanelColumns] = {};

// Sums of int8 go on as floats do, once they are: with a routine of their own for each activation there was twice the code.
void finish_integers(const GemmCall& call, const EpilogueStrip& strip, int64_t begin, int64_t end) {
  const int64_t width = call.weight.gated ? kTileColumns : kPanelColumns;
  for (int64_t panel = 0; panel * width < strip.columns; ++panel) to_real_numbers(call, strip, panel, begin, end);
  EpilogueStrip reals = strip;
  reals.bias = kNoBias;
  reals.scale = nullptr;
  EpilogueFn* finish = nullptr;
  select_f32(call, &finish);
  finish(call, reals, begin, end);
}

void select_s32(const GemmCall&, EpilogueFn** chosen) { *chosen = finish_integers; }

}  // namespace

XOPT_REGISTER_KERNEL(epilogue, f32, select_f32);
XOPT_REGISTER_KERNEL(epilogue, s32, select_s32);

}  // namespace xopt::XOPT_ISA
