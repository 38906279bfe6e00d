// LayerNorm and RMSNorm over rows. See norm.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A row is read once, as floats into a buffer that stays in L1; the passes that follow (squares about the mean, which
// one pass would get wrong where the mean is large; then the result) read that. Four sums are kept, since one would
// wait for each addition.
#include "kernels/norm.h"

#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kSums = 4;
constexpr int64_t kStep = kSums * kWidth;
constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

XOPT_INLINE int64_t row_offset(const RowsView& view, int64_t row) {
  return row / view.inner_rows * view.outer_stride + row % view.inner_rows * view.row_stride;
}

// Sums of f(vector at i) over the row; what is past its end counts as zero.
template <class Function>
XOPT_INLINE float sum_of(int64_t columns, const Function& f) {
  F sums[kSums];
#pragma GCC unroll 4
  for (int64_t s = 0; s < kSums; ++s) sums[s] = set1(0.0F);
  int64_t i = 0;
  for (; i + kStep <= columns; i += kStep) {
#pragma GCC unroll 4
    for (int64_t s = 0; s < kSums; ++s) sums[s] = add(sums[s], f(i + s * kWidth));
  }
  for (; i + kWidth <= columns; i += kWidth) sums[0] = add(sums[0], f(i));
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

class RowNorm {
 public:
  RowNorm(const NormCall& call, float* values) : call_(call), values_(values) {}

  void run(int64_t row) {
    read(row);
    const int64_t n = call_.columns;
    float mean = 0.0F;
    if (call_.norm == Norm::layer_norm) {
      mean = sum_of(n, [&](int64_t i) { return load(values_ + i); });
      for (int64_t i = n / kWidth * kWidth; i < n; ++i) mean += values_[i];
      mean /= static_cast<float>(n);
    }
    float squares = sum_of(n, [&](int64_t i) {
      const F distance = sub(load(values_ + i), set1(mean));
      return mul(distance, distance);
    });
    for (int64_t i = n / kWidth * kWidth; i < n; ++i) squares += (values_[i] - mean) * (values_[i] - mean);
    const F variance = set1(squares / static_cast<float>(n) + call_.eps);
    write(row, set1(mean), div(set1(1.0F), sqrt(variance)));
  }

 private:
  void read(int64_t row) {
    const RowsView &input = call_.input, &residual = call_.residual;
    const int64_t from = row_offset(input, row), n = call_.columns;
    if (residual.data == nullptr) {
      for (int64_t i = 0; i < n; i += kWidth)
        store_first(values_ + i, load_any(input.data, input.dtype, from + i, n - i), n - i);
    } else {
      const int64_t other = row_offset(residual, row);
      for (int64_t i = 0; i < n; i += kWidth) {
        const F x = load_any(input.data, input.dtype, from + i, n - i);
        store_first(values_ + i, add(x, load_any(residual.data, residual.dtype, other + i, n - i)), n - i);
      }
    }
    if (call_.sum == nullptr) return;
    for (int64_t i = 0; i < n; i += kWidth) {
      store_any(call_.sum, input.dtype, row * n + i, load_first(values_ + i, n - i), n - i);
    }
  }

  void write(int64_t row, F mean, F scale) {
    const int64_t n = call_.columns;
    const ColumnVector &weight = call_.weight, &bias = call_.bias;
    const F offset = set1(call_.weight_offset);
    for (int64_t i = 0; i < n; i += kWidth) {
      F y = mul(sub(load_first(values_ + i, n - i), mean), scale);
      if (weight.data != nullptr) y = mul(y, add(load_any(weight.data, weight.dtype, i, n - i), offset));
      if (bias.data != nullptr) y = add(y, load_any(bias.data, bias.dtype, i, n - i));
      store_any(call_.out, call_.out_dtype, row * n + i, y, n - i);
    }
  }

  const NormCall& call_;
  float* values_;
};

void norm(const NormCall& call) {
  const int64_t wanted = (call.rows * call.columns + kValuesOfAThread - 1) / kValuesOfAThread;
  const auto threads = static_cast<int>(minimum<int64_t>(minimum<int64_t>(max_threads(), call.rows), wanted));
  parallel(threads, [&](int thread, int count) {
    const Scratch values(static_cast<size_t>(call.columns) * sizeof(float));
    RowNorm row_norm(call, values.as<float>());
    const int64_t end = call.rows * (thread + 1) / count;
    for (int64_t row = call.rows * thread / count; row < end; ++row) row_norm.run(row);
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(norm, f32, norm);

}  // namespace xopt::XOPT_ISA
