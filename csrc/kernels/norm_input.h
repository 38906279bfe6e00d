// Rows that a norm follows: their sums wait as floats until all columns are there.
#pragma once

#include "kernels/gemm_plan.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {

inline GemmCall norm_input_call(const GemmCall& call, float* values) {
  GemmCall inner = call;
  inner.epilogue.out = values;
  inner.epilogue.out_dtype = DType::f32;
  inner.epilogue.out_row_stride = call.weight.n;
  return inner;
}

// Rows of the product from `first` on, whose values `values` begins with.
inline void normalise(const GemmCall& call, const float* values, int64_t first, int64_t rows) {
  static Kernel<RowNormFn> norm("row_norm", "f32");
  parallel(static_cast<int>(minimum<int64_t>(xopt::max_threads(), rows)), [&](int thread, int threads) {
    const Range mine = share(rows, threads, thread);
    norm(call, values, first, mine.begin, mine.end);
  });
}

}  // namespace xopt::XOPT_ISA
