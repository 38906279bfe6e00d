// Softmax over rows. See softmax.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A row comes from memory once, as floats that stay in L1: its maximum, then exponentials in their place and their sum,
// then the result.
#include "kernels/softmax.h"

#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"
#include "tiles/row_loops.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 4096;  // fewer are not worth waking another thread

template <class T>
float read_row(const T* input, int64_t columns, float* values) {
  F largest = set1(-__builtin_inff());
  float last = -__builtin_inff();
  for_each_vector(columns, [&](int64_t i, int64_t count) {
    const F x = load_first(input + i, count);
    store_first(values + i, x, count);
    if (count >= kWidth) {
      largest = max(x, largest);
    } else {
      for (int64_t j = i; j < columns; ++j) last = maximum(last, values[j]);
    }
  });
  float lanes[kWidth];
  store(lanes, largest);
  for (const float lane : lanes) last = maximum(last, lane);
  return last;
}

template <class T>
void softmax_of(const SoftmaxCall& call) {
  const int64_t n = call.columns;
  const int64_t threads = minimum(minimum<int64_t>(max_threads(), call.rows), call.rows * n / kValuesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    const Scratch scratch(static_cast<size_t>(n) * sizeof(float));
    float* values = scratch.as<float>();
    for (int64_t row = call.rows * thread / count; row < call.rows * (thread + 1) / count; ++row) {
      const F largest = set1(read_row(reinterpret_cast<const T*>(row_of(call.input, row)), n, values));
      const float total = sum_of(n, [=](int64_t i, int64_t c) {
        const F e = first_of(exp(sub(load_first(values + i, c), largest)), c);
        store_first(values + i, e, c);
        return e;
      });
      const F divisor = set1(total);
      for_each_vector(n, [&](int64_t i, int64_t c) {
        store_any(call.out, call.out_dtype, row * n + i, div(load_first(values + i, c), divisor), c);
      });
    }
  });
}

void softmax(const SoftmaxCall& call) {
  if (call.input.dtype == DType::f32) return softmax_of<float>(call);
  return call.input.dtype == DType::bf16 ? softmax_of<Bf16>(call) : softmax_of<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(softmax, f32, softmax);

}  // namespace xopt::XOPT_ISA
