// Sums that become output while they are still in registers, for the epilogues that are a few instructions.
//
// An epilogue of its own reads sums back that the block has just written, and looks up for each panel what its rows have
// in common: of a 1 x 1 convolution of 16 channels that was two thirds of the time.
#pragma once

#include <limits>

#include "tiles/layout.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// min(high, max(low, sum * scale + bias)), with `other` added before or after the clamp.
template <class Out>
struct Finish {
  Out* out = nullptr;
  int64_t out_stride = 0;        // elements, as all others
  const float* bias = nullptr;   // of all columns, up to a multiple of kWidth
  const float* scale = nullptr;  // likewise; nullptr: 1
  const Out* other = nullptr;
  int64_t other_stride = 0;
  bool clamp_last = false;
  bool clamps = false;  // else low and high are not looked at
  float low = -std::numeric_limits<float>::infinity(), high = std::numeric_limits<float>::infinity();
  int64_t columns = 0;

  XOPT_INLINE void skip(int64_t count) {
    out += count;
    bias += count;
    if (scale != nullptr) scale += count;
    if (other != nullptr) other += count;
    columns -= count;
  }
};

template <int R, class Out>
XOPT_INLINE void add_other(const Finish<Out>& f, int64_t rows, int64_t column, F (&x)[R]) {
  const Out* other = f.other + column;
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r, other += f.other_stride) {
    asm("" : "+r"(other));  // GCC would keep a place for each row, in memory
    if (r < rows) x[r] = add(x[r], load(other));
  }
}

// R rows of the kWidth columns from `column` on. Scales: else sums have scale and bias in them.
template <bool Scales, int R, class Out>
XOPT_INLINE void finish_columns(const Finish<Out>& f, int64_t rows, int64_t column, F (&x)[R]) {
  const F bias = Scales ? load(f.bias + column) : set1(0.0F);
  if (Scales && f.scale != nullptr) {
    const F scale = load(f.scale + column);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) x[r] = fma(x[r], scale, bias);
  } else if (Scales) {
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) x[r] = add(x[r], bias);
  }
  if (f.other != nullptr && f.clamp_last) add_other(f, rows, column, x);
  if (f.clamps) {
    const F low = set1(f.low), high = set1(f.high);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) x[r] = min(high, max(low, x[r]));
  }
  if (f.other != nullptr && !f.clamp_last) add_other(f, rows, column, x);
  Out* out = f.out + column;
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r, out += f.out_stride) {
    asm("" : "+r"(out));
    if (r < rows) store(out, x[r]);
  }
}

// Likewise, of the first columns where there are fewer: what is rare is a loop, and one function for all that finish such
// rows. Unrolled in each, it was most of what the compiler had to do for blocks with short epilogues.
template <class Out>
[[gnu::noinline]] void finish_in_memory(const Finish<Out>& f, int64_t rows, int64_t column, bool scales, const F* x) {
  const int64_t count = f.columns - column;
  // Where there is nothing to do, what changes no value, nor the sign of a zero.
  const F scale = scales && f.scale != nullptr ? load(f.scale + column) : set1(1.0F);
  const F bias = scales ? load(f.bias + column) : set1(-0.0F);
  const F low = set1(f.low), high = set1(f.high);
  Out* out = f.out + column;
  const Out* other = f.other != nullptr ? f.other + column : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    F y = fma(x[r], scale, bias);
    if (other != nullptr && f.clamp_last) y = add(y, load_first(other, count));
    if (f.clamps) y = min(high, max(low, y));
    if (other != nullptr && !f.clamp_last) y = add(y, load_first(other, count));
    store_first(out, y, count);
    out += f.out_stride;
    if (other != nullptr) other += f.other_stride;
  }
}

// Of sums in registers, which stay there: it is copies that have an address.
template <bool Scales, int R, class Out>
XOPT_INLINE void finish_rarely(const Finish<Out>& f, int64_t rows, int64_t column, const F (&x)[R]) {
  F copies[R];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) copies[r] = x[r];
  finish_in_memory(f, minimum<int64_t>(rows, R), column, Scales, copies);
}

// R rows, or the first of them, of the kWidth columns from `column` on, or the first of those.
template <bool Scales = true, int R, class Out>
XOPT_INLINE void finish_rows(const Finish<Out>& f, int64_t column, F (&x)[R], int64_t rows = R) {
  if (f.columns - column >= kWidth) {
    finish_columns<Scales>(f, rows, column, x);
  } else {
    finish_rarely<Scales>(f, rows, column, x);
  }
}

}  // namespace xopt::XOPT_ISA
