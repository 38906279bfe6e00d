// GroupNorm with an activation. See group_norm.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Two passes over an image. The first sums each channel, vectors of channels at a time, and its squares about the value
// at the first position, so that a mean far from zero costs no accuracy; sums of a few positions are added up in double
// precision. The second writes. With fewer images than threads, threads share an image's positions in both.
#include "kernels/group_norm.h"

#include <type_traits>

#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/math.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kPositionsOfAChain = 64;   // summed in fp32 before they are added up
constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

// Of a channel, over the positions that a thread has: sums of x - first and of its square.
struct Sums {
  double* value;
  double* square;
};

template <class T>
const T* image_of(const GroupNormCall& call, int64_t image) {
  return static_cast<const T*>(call.input) + image * call.positions * call.channels;
}

// N vectors of channels from c on, over a chain of positions.
template <int N, class T>
XOPT_INLINE void add_chain(const T* first, const T* x, int64_t step, int64_t positions, int64_t count, double* values,
                           double* squares) {
  F origin[N], value[N], square[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    origin[n] = load_first(first + n * kWidth, count);
    value[n] = square[n] = set1(0.0F);
  }
  for (int64_t p = 0; p < positions; ++p, x += step) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const F distance = sub(load_first(x + n * kWidth, count), origin[n]);
      value[n] = add(value[n], distance);
      square[n] = fma(distance, distance, square[n]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    float chain[2][kWidth];
    store(chain[0], value[n]);
    store(chain[1], square[n]);
    for (int64_t i = 0; i < count; ++i) {
      values[n * kWidth + i] += chain[0][i];
      squares[n * kWidth + i] += chain[1][i];
    }
  }
}

template <class T>
void sum_channels(const GroupNormCall& call, int64_t image, int64_t begin, int64_t end, Sums sums) {
  const T* first = image_of<T>(call, image);
  const int64_t n = call.channels;
  for (int64_t c = 0; c < n; ++c) sums.value[c] = sums.square[c] = 0.0;
  for (int64_t start = begin; start < end; start += kPositionsOfAChain) {
    const int64_t positions = minimum(end - start, kPositionsOfAChain);
    const T* x = first + start * n;
    int64_t c = 0;
    for (; c + 4 * kWidth <= n; c += 4 * kWidth) {
      add_chain<4>(first + c, x + c, n, positions, kWidth, sums.value + c, sums.square + c);
    }
    for (; c < n; c += kWidth) {
      add_chain<1>(first + c, x + c, n, positions, minimum<int64_t>(kWidth, n - c), sums.value + c, sums.square + c);
    }
  }
}

// mean, factor and addend of each channel, out of the sums of all threads.
struct Channels {
  float *mean, *factor, *addend;
};

template <class T>
void find_statistics(const GroupNormCall& call, int64_t image, const double* sums, int64_t parts, Channels channels) {
  const int64_t width = call.channels / call.groups;
  const T* x = image_of<T>(call, image);
  const auto positions = static_cast<double>(call.positions);
  const auto sum_of = [&](int64_t c, int64_t which) {
    double total = 0.0;
    for (int64_t part = 0; part < parts; ++part) total += sums[(2 * part + which) * call.channels + c];
    return total;
  };
  const auto as_double = [](F first) {
    float value[kWidth];
    store(value, first);
    return static_cast<double>(value[0]);
  };
  // Shifts move what squares are taken about, and so cost nothing for each position.
  const auto shift_of = [&](int64_t c) {
    const ColumnVector& shift = call.shift;
    return shift.data == nullptr ? 0.0 : as_double(load_any(shift.data, shift.dtype, image * call.shift_stride + c, 1));
  };
  const auto origin_of = [&](int64_t c) { return as_double(load_first(x + c, 1)) + shift_of(c); };
  for (int64_t group = 0; group < call.groups; ++group) {
    double mean = 0.0, squares = 0.0;
    for (int64_t c = group * width; c < (group + 1) * width; ++c) mean += origin_of(c) + sum_of(c, 0) / positions;
    mean /= static_cast<double>(width);
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      // Squares about the first value, moved to the mean.
      const double away = mean - origin_of(c), total = sum_of(c, 0);
      squares += sum_of(c, 1) - 2.0 * away * total + positions * away * away;
    }
    const double variance =
        squares > 0.0 || squares != squares ? squares / (positions * static_cast<double>(width)) : 0;
    const float scale = 1.0F / __builtin_sqrtf(static_cast<float>(variance) + call.eps);
    for (int64_t c = group * width; c < (group + 1) * width; ++c) {
      channels.mean[c] = static_cast<float>(mean - shift_of(c));
      channels.factor[c] = scale;
      channels.addend[c] = 0.0F;
    }
  }
  for (int64_t c = 0; c < call.channels; c += kWidth) {
    const int64_t count = minimum<int64_t>(kWidth, call.channels - c);
    if (call.weight.data != nullptr) {
      const F weight = load_any(call.weight.data, call.weight.dtype, c, count);
      store_first(channels.factor + c, mul(load_first(channels.factor + c, count), weight), count);
    }
    if (call.bias.data != nullptr) {
      store_first(channels.addend + c, load_any(call.bias.data, call.bias.dtype, c, count), count);
    }
  }
}

template <class T, class Out, Activation A>
void write_positions(const GroupNormCall& call, int64_t image, int64_t begin, int64_t end, Channels channels) {
  const int64_t n = call.channels, whole = n / kWidth * kWidth;
  for (int64_t p = begin; p < end; ++p) {
    const T* x = image_of<T>(call, image) + p * n;
    Out* out = static_cast<Out*>(call.out) + (image * call.positions + p) * n;
    const auto finish = [&](int64_t c, int64_t count) {
      const F distance = sub(load_first(x + c, count), load_first(channels.mean + c, count));
      const F y = fma(distance, load_first(channels.factor + c, count), load_first(channels.addend + c, count));
      store_first(out + c, activate<A, std::is_same_v<Out, Bf16>>(y, y, y), count);
    };
    for (int64_t c = 0; c < whole; c += kWidth) finish(c, kWidth);
    if (whole < n) finish(whole, n - whole);
  }
}

using WritePositions = void(const GroupNormCall&, int64_t image, int64_t begin, int64_t end, Channels channels);

template <class T, class Out>
WritePositions* select_activation(const GroupNormCall& call) {
  if (call.activation == Activation::silu) return write_positions<T, Out, Activation::silu>;
  if (call.activation == Activation::relu) return write_positions<T, Out, Activation::relu>;
  return write_positions<T, Out, Activation::none>;
}

template <class T>
WritePositions* select_write(const GroupNormCall& call) {
  if (call.out_dtype == DType::f32) return select_activation<T, float>(call);
  return call.out_dtype == DType::bf16 ? select_activation<T, Bf16>(call) : select_activation<T, F16>(call);
}

template <class T>
void group_norm_of(const GroupNormCall& call) {
  WritePositions* write = select_write<T>(call);
  const int64_t wanted = call.images * call.positions * call.channels / kValuesOfAThread + 1;
  const int64_t threads = minimum<int64_t>(max_threads(), wanted);
  // Each image is cut into the same parts, whatever the number of threads, so that results do not depend on it.
  const int64_t parts = minimum<int64_t>(16, call.positions / kPositionsOfAChain + 1);
  const int64_t n = call.channels;
  const Scratch sums(static_cast<size_t>(call.images * parts * 2 * n) * sizeof(double));
  const Scratch vectors(static_cast<size_t>(call.images * 3 * n) * sizeof(float));
  const auto each_part = [&](const auto& body) {
    parallel(static_cast<int>(threads), [&](int thread, int count) {
      const int64_t total = call.images * parts;
      for (int64_t i = total * thread / count; i < total * (thread + 1) / count; ++i) {
        const int64_t part = i % parts;
        body(i / parts, i, call.positions * part / parts, call.positions * (part + 1) / parts);
      }
    });
  };
  each_part([&](int64_t image, int64_t i, int64_t begin, int64_t end) {
    double* own = sums.as<double>() + i * 2 * n;
    sum_channels<T>(call, image, begin, end, {own, own + n});
  });
  const auto channels_of = [&](int64_t image) {
    float* own = vectors.as<float>() + image * 3 * n;
    return Channels{own, own + n, own + 2 * n};
  };
  for (int64_t image = 0; image < call.images; ++image) {
    find_statistics<T>(call, image, sums.as<double>() + image * parts * 2 * n, parts, channels_of(image));
  }
  each_part(
      [&](int64_t image, int64_t, int64_t begin, int64_t end) { write(call, image, begin, end, channels_of(image)); });
}

void group_norm(const GroupNormCall& call) {
  if (call.dtype == DType::f32) return group_norm_of<float>(call);
  return call.dtype == DType::bf16 ? group_norm_of<Bf16>(call) : group_norm_of<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(group_norm, f32, group_norm);

}  // namespace xopt::XOPT_ISA
