// Epilogues that are a few instructions, which kernels do on sums that are still in registers (tiles/finish.h).
#pragma once

#include "kernels/epilogue.h"
#include "tiles/finish.h"

namespace xopt::XOPT_ISA {

// Where what is added is of the dtype `other`. A row's norm is none of the epilogue's business: it comes after. Nor is what
// sums of int8 are multiplied by.
inline bool is_simple(const Epilogue& e, DType other) {
  const bool clamps =
      e.activation == Activation::none || e.activation == Activation::relu || e.activation == Activation::clamp;
  const bool adds = e.binary == Binary::none || (e.binary == Binary::add && e.other_dtype == other);
  const bool rounds = e.out_dtype == DType::s8 || e.out_dtype == DType::u8;
  return clamps && adds && !rounds && e.positions == nullptr;
}

// Whether all rows of a product have the same scale and zero point, which then are its columns'.
inline bool rows_are_alike(const GemmCall& call) {
  const Epilogue& e = call.epilogue;
  return !e.row_scale_per_row && !e.row_zero_point_per_row && call.weight.zero_point == nullptr;
}

// Whether a product's epilogue is, and what it adds and writes of this dtype, or what it writes of that other one.
inline bool finishes_simply(const GemmCall& call, DType dtype, DType or_out) {
  const PackedWeight& w = call.weight;
  const DType out = call.epilogue.out_dtype;
  const bool simple = is_simple(call.epilogue, dtype) && rows_are_alike(call);
  return w.k_tiles > 0 && !w.gated && (out == dtype || out == or_out) && simple;
}
inline bool finishes_simply(const GemmCall& call, DType dtype) { return finishes_simply(call, dtype, dtype); }

// Of an epilogue that is, for rows of the output from `row` on, which are those from `out_row` on of epilogue.out, and the
// strip's columns from `first` on.
template <class Out>
Finish<Out> finish_of(const Epilogue& e, const EpilogueStrip& strip, int64_t row, int64_t out_row, int64_t first) {
  Finish<Out> finish;
  finish.out = static_cast<Out*>(e.out) + out_row * e.out_row_stride + strip.column + first;
  finish.out_stride = e.out_row_stride;
  finish.bias = strip.bias + first;
  finish.scale = strip.scale != nullptr ? strip.scale + first : nullptr;
  if (e.binary == Binary::add) {
    finish.other = static_cast<const Out*>(e.other) + row * e.other_row_stride + strip.column + first;
    finish.other_stride = e.other_row_stride;
    finish.clamp_last = e.activation_last;
  }
  finish.clamps = e.activation != Activation::none;  // of those that are simple
  if (e.activation == Activation::relu) finish.low = 0.0F;
  if (e.activation == Activation::clamp) {
    finish.low = e.alpha;
    finish.high = e.beta;
  }
  finish.columns = strip.columns - first;
  return finish;
}

}  // namespace xopt::XOPT_ISA
