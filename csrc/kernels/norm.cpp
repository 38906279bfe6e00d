// LayerNorm, RMSNorm and normalizing to length 1 over rows. See norm.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A row comes from memory once, as floats that stay in L1; the passes that follow (squares about the mean, which one
// pass would get wrong where the mean is large; then the result) read those, while the next row is fetched. The loops
// are compiled for each dtype: a branch on it for each vector cost more than the arithmetic.
#include "kernels/norm.h"

#include <type_traits>

#include "kernels/epilogue.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "runtime/shared_parts.h"
#include "tiles/any_dtype.h"
#include "tiles/row_loops.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

struct None {};  // the type of what a call does not have

template <class T>
constexpr bool kGiven = !std::is_same_v<T, None>;

// Of one row. The loops take these by value: behind a reference, each store could change them.
struct RowInput {
  const void *input, *residual;
  float* values;  // not used where the input has them already
  void* sum;      // nullptr: not wanted, or `values` are it
};

struct RowOutput {
  const float *values, *weight, *bias;
  void* out;
  float mean, scale;
};

// Memory that is wanted next, of which a value takes `size` bytes: some is fetched for each vector of a row.
struct Ahead {
  const uint8_t* data;
  int64_t size;

  XOPT_INLINE void fetch(int64_t column) const {
    if constexpr (kWidth > 1) __builtin_prefetch(data + column * size, 0, 3);
  }
};

// s of a row, and the sum of it.
template <class In, class Residual, class Sum = In>
float read_row(RowInput row, int64_t columns) {
  constexpr bool kStored = kGiven<Residual> || !std::is_same_v<In, float>;
  const auto* input = static_cast<const In*>(row.input);
  return sum_of(columns, [=](int64_t i, int64_t count) {
    F x = load_first(input + i, count);
    if constexpr (kGiven<Residual>) x = add(x, load_first(static_cast<const Residual*>(row.residual) + i, count));
    if constexpr (kStored) store_first(row.values + i, x, count);
    if (row.sum != nullptr) store_first(static_cast<Sum*>(row.sum) + i, x, count);
    return x;
  });
}

// Of its own this pass needs nothing from memory, which fetches the next row meanwhile, and the lines of this one's
// output, for whose ownership the stores would wait.
float squares_about(float mean, const float* values, Ahead input, Ahead out, int64_t columns) {
  return sum_of(columns, [=](int64_t i, int64_t count) {
    input.fetch(i);
    out.fetch(i);
    const F distance = first_of(sub(load_first(values + i, count), set1(mean)), count);
    return mul(distance, distance);
  });
}

template <class Out, bool kWeight, bool kBias>
void write_row(RowOutput row, Ahead residual, int64_t columns) {
  auto* out = static_cast<Out*>(row.out);
  const auto result = [=](int64_t i, int64_t count) {
    const F y = mul(sub(load_first(row.values + i, count), set1(row.mean)), set1(row.scale));
    if constexpr (kWeight && kBias) {
      return fma(y, load_first(row.weight + i, count), load_first(row.bias + i, count));
    } else if constexpr (kWeight) {
      return mul(y, load_first(row.weight + i, count));
    } else if constexpr (kBias) {
      return add(y, load_first(row.bias + i, count));
    } else {
      return y;
    }
  };
  int64_t i = 0;
  for (; i + 2 * kWidth <= columns; i += 2 * kWidth) {
    if (residual.data != nullptr) {
      residual.fetch(i);
      residual.fetch(i + kWidth);
    }
    store_two(out + i, result(i, kWidth), result(i + kWidth, kWidth));
  }
  for_each_vector(columns - i,
                  [=](int64_t rest, int64_t count) { store_first(out + i + rest, result(i + rest, count), count); });
}

using ReadRow = float(RowInput row, int64_t columns);
using WriteRow = void(RowOutput row, Ahead residual, int64_t columns);

template <class In>
ReadRow* select_residual(const RowsView& residual) {
  if (residual.data == nullptr) return read_row<In, None>;
  if (residual.dtype == DType::f32) return read_row<In, float>;
  return residual.dtype == DType::bf16 ? read_row<In, Bf16> : read_row<In, F16>;
}

ReadRow* select_read(const NormCall& call) {
  if (call.sum != nullptr && call.sum_dtype != call.input.dtype) {  // of finished sums, which are floats
    return call.sum_dtype == DType::bf16 ? read_row<float, None, Bf16> : read_row<float, None, F16>;
  }
  if (call.input.dtype == DType::f32) return select_residual<float>(call.residual);
  return call.input.dtype == DType::bf16 ? select_residual<Bf16>(call.residual) : select_residual<F16>(call.residual);
}

template <class Out>
WriteRow* select_vectors(const NormCall& call) {
  const bool bias = call.bias.data != nullptr;
  if (call.weight.data == nullptr) return bias ? write_row<Out, false, true> : write_row<Out, false, false>;
  return bias ? write_row<Out, true, true> : write_row<Out, true, false>;
}

WriteRow* select_write(const NormCall& call) {
  if (call.out_dtype == DType::f32) return select_vectors<float>(call);
  return call.out_dtype == DType::bf16 ? select_vectors<Bf16>(call) : select_vectors<F16>(call);
}

// A thread's rows.
class RowNorm {
 public:
  // `scratch`: three times the columns.
  RowNorm(const NormCall& call, float* scratch)
      : call_(call), read_(select_read(call)), write_(select_write(call)), values_(scratch) {
    weight_ = as_floats(call.weight, call.weight_offset, scratch + call.columns);
    bias_ = as_floats(call.bias, 0.0F, scratch + 2 * call.columns);
  }

  void run(int64_t first, int64_t last) {
    Place place = place_of(first);
    for (int64_t row = first; row < last; ++row) {
      const Place next = row + 1 < last ? place_of(row + 1) : place;
      norm_row(row, place, next);
      place = next;
    }
  }

 private:
  const float* as_floats(const ColumnVector& vector, float offset, float* to) const {
    if (vector.data == nullptr) return nullptr;
    if (vector.dtype == DType::f32 && offset == 0.0F) return static_cast<const float*>(vector.data);
    for_each_vector(call_.columns, [&](int64_t i, int64_t count) {
      store_first(to + i, add(load_any(vector.data, vector.dtype, i, count), set1(offset)), count);
    });
    return to;
  }

  // Where the inputs of a row are.
  struct Place {
    const uint8_t *input, *residual;
  };
  Place place_of(int64_t row) const { return {row_of(call_.input, row), row_of(call_.residual, row)}; }

  void norm_row(int64_t row, const Place& place, const Place& next) {
    const int64_t n = call_.columns;
    RowInput from{place.input, place.residual, values_, nullptr};
    if (call_.sum != nullptr) from.sum = static_cast<uint8_t*>(call_.sum) + row * n * dtype_size(call_.sum_dtype);
    const float* values = values_;
    if (call_.input.dtype == DType::f32 && from.residual == nullptr) {
      values = static_cast<const float*>(from.input);
    } else if (from.sum != nullptr && call_.sum_dtype == DType::f32) {
      values = from.values = static_cast<float*>(from.sum);
      from.sum = nullptr;
    }
    const float total = read_(from, n);
    const float mean = call_.norm == Norm::layer_norm ? total / static_cast<float>(n) : 0.0F;
    uint8_t* out = static_cast<uint8_t*>(call_.out) + row * n * dtype_size(call_.out_dtype);
    const Ahead next_input{next.input, dtype_size(call_.input.dtype)};
    const Ahead next_residual{next.residual, dtype_size(call_.residual.dtype)};
    const float squares = squares_about(mean, values, next_input, {out, dtype_size(call_.out_dtype)}, n);
    write_({values, weight_, bias_, out, mean, 1.0F / divisor(squares)}, next_residual, n);
  }

  float divisor(float squares) const {
    if (call_.norm == Norm::unit_norm) return maximum(__builtin_sqrtf(squares), call_.eps);
    return __builtin_sqrtf(squares / static_cast<float>(call_.columns) + call_.eps);
  }

  const NormCall& call_;
  ReadRow* read_;
  WriteRow* write_;
  float* values_;
  const float *weight_, *bias_;
};

void norm(const NormCall& call) {
  const int64_t wanted = (call.rows * call.columns + kValuesOfAThread - 1) / kValuesOfAThread;
  const auto threads = static_cast<int>(minimum<int64_t>(minimum<int64_t>(max_threads(), call.rows), wanted));
  SharedParts shared(threads, kValuesOfAThread / 4 / maximum<int64_t>(call.columns, 1));
  shared.deal(call.rows);
  parallel_for_some(threads, [&](int thread, int count) {
    const Scratch scratch(static_cast<size_t>(call.columns) * 3 * sizeof(float));
    RowNorm row_norm(call, scratch.as<float>());
    shared.each(thread, count, [&](int64_t, int64_t begin, int64_t end) { row_norm.run(begin, end); });
  });
}

// Of rows that a product has finished (epilogue.h).
void row_norm(const GemmCall& call, const float* values, int64_t first_row, int64_t begin, int64_t end) {
  const NormCall rows = norm_after(call, values + begin * call.weight.n, first_row + begin, end - begin);
  const Scratch scratch(static_cast<size_t>(rows.columns) * 3 * sizeof(float));
  RowNorm(rows, scratch.as<float>()).run(0, rows.rows);
}

}  // namespace

XOPT_REGISTER_KERNEL(norm, f32, norm);
XOPT_REGISTER_KERNEL(row_norm, f32, row_norm);

}  // namespace xopt::XOPT_ISA
