// A BatchNorm by running statistics. See batch_norm.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Memory is what it waits for: dtypes are told apart at each load rather than by a kernel for each of their combinations,
// and the mean is taken off first, so that one far from zero costs no accuracy.
#include "kernels/batch_norm.h"

#include "kernels/each_activation.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/row_loops.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 8192;  // fewer are not worth waking another thread

// Of each channel.
struct Channels {
  float *mean, *factor, *addend;
};

void find_channels(const BatchNormCall& call, Channels channels) {
  const auto value = [](const ColumnVector& vector, int64_t c, int64_t count, float absent) {
    return vector.data == nullptr ? set1(absent) : load_any(vector.data, vector.dtype, c, count);
  };
  const F eps = set1(call.eps);
  for_each_vector(call.channels, [&](int64_t c, int64_t count) {
    const F deviation = sqrt(add(value(call.variance, c, count, 1.0F), eps));
    store_first(channels.mean + c, value(call.mean, c, count, 0.0F), count);
    store_first(channels.factor + c, div(value(call.weight, c, count, 1.0F), deviation), count);
    store_first(channels.addend + c, value(call.epilogue.bias, c, count, 0.0F), count);
  });
}

template <Activation A>
void write_rows(const BatchNormCall& call, int64_t begin, int64_t end, Channels channels) {
  const Epilogue& e = call.epilogue;
  const F alpha = set1(e.alpha), beta = set1(e.beta);
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* x = row_of(call.input, row);
    const int64_t other = row * e.other_row_stride, out = row * e.out_row_stride;
    const auto with_other = [&](F y, int64_t c, int64_t count) {
      const F given = load_any(e.other, e.other_dtype, other + c, count);
      return e.binary == Binary::add ? add(y, given) : mul(y, given);
    };
    for_each_vector(call.channels, [&](int64_t c, int64_t count) {
      const F distance = sub(load_any(x, call.input.dtype, c, count), load_first(channels.mean + c, count));
      F y = fma(distance, load_first(channels.factor + c, count), load_first(channels.addend + c, count));
      if (e.binary != Binary::none && e.activation_last) y = with_other(y, c, count);
      y = activate<A>(y, alpha, beta);
      if (e.binary != Binary::none && !e.activation_last) y = with_other(y, c, count);
      store_any(e.out, e.out_dtype, out + c, y, count);
    });
  }
}

using WriteRows = void(const BatchNormCall&, int64_t begin, int64_t end, Channels channels);

WriteRows* select_write(Activation activation) {
  switch (activation) {
#define XOPT_WRITE_CASE(NAME) \
  case Activation::NAME:      \
    return write_rows<Activation::NAME>;
    XOPT_EACH_ACTIVATION(XOPT_WRITE_CASE)
#undef XOPT_WRITE_CASE
  }
  return nullptr;
}

void batch_norm(const BatchNormCall& call) {
  const int64_t n = call.channels;
  const Scratch vectors(static_cast<size_t>(3 * n) * sizeof(float));
  const Channels channels{vectors.as<float>(), vectors.as<float>() + n, vectors.as<float>() + 2 * n};
  find_channels(call, channels);
  WriteRows* write = select_write(call.epilogue.activation);
  const int64_t threads = minimum<int64_t>(max_threads(), call.rows * n / kValuesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    write(call, call.rows * thread / count, call.rows * (thread + 1) / count, channels);
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(batch_norm, f32, batch_norm);

}  // namespace xopt::XOPT_ISA
