// Pooling. See pool.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A window's values lie at a constant distance for each channel, so a vector of channels is reduced in registers, four
// of them at a time; the windows of an output line follow each other, and what they share is in L1.
#include "kernels/pool.h"

#include <type_traits>

#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/row_loops.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kVectors = 4;  // of channels, reduced at once
constexpr int64_t kChannelsAtOnce = kVectors * kWidth;
constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

// What a window's values become.
struct Max {
  F value = set1(-__builtin_inff());
  F nan = set1(0.0F);  // NaN once a value was

  XOPT_INLINE void take(F x) {
    value = max(value, x);
    // Comparisons lose a NaN; a product with zero keeps it, if infinities are kept out.
    nan = fma(min(set1(3.4028235e38F), abs(x)), set1(0.0F), nan);
  }
  XOPT_INLINE F result(F) const { return add(value, nan); }

  template <int N, class T>
  static XOPT_INLINE void take_line(const T* x, int64_t width, int64_t step, int64_t count, Max (&most)[N]) {
    for (int64_t w = 0; w < width; ++w, x += step) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) most[n].take(load_first(x + n * kWidth, count));
    }
  }
};

// The mean, or the root of the sum of squares.
template <bool kSquares>
struct Sum {
  F value = set1(0.0F);

  static XOPT_INLINE F added(F sum, F x) { return kSquares ? fma(x, x, sum) : add(sum, x); }
  XOPT_INLINE F result(F divisor) const { return kSquares ? sqrt(value) : div(value, divisor); }

  // Sums of sums, since one of a whole image's values would round as often as there are values. A vector alone has four
  // under way: each addition waits for the one before.
  template <int N, class T>
  static XOPT_INLINE void take_line(const T* x, int64_t width, int64_t step, int64_t count, Sum (&sums)[N]) {
    constexpr int kChains = N == 1 ? 4 : 1;
    F line[kChains][N];
#pragma GCC unroll 4
    for (int i = 0; i < kChains * N; ++i) line[i / N][i % N] = set1(0.0F);
    int64_t w = 0;
    for (; w + kChains <= width; w += kChains) {
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain, x += step) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) line[chain][n] = added(line[chain][n], load_first(x + n * kWidth, count));
      }
    }
    for (; w < width; ++w, x += step) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) line[0][n] = added(line[0][n], load_first(x + n * kWidth, count));
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      F sum = line[0][n];
      if constexpr (kChains == 4) sum = add(add(sum, line[1][n]), add(line[2][n], line[3][n]));
      sums[n].value = add(sums[n].value, sum);
    }
  }
};
using Average = Sum<false>;
using Norm = Sum<true>;

template <class Kind, int N, class T>
XOPT_INLINE void reduce(const T* first, const PoolWindow* windows, const int64_t* step, int64_t count, F divisor,
                        T* out) {
  Kind sums[N];
  for (int64_t d = 0; d < windows[0].count; ++d) {
    for (int64_t h = 0; h < windows[1].count; ++h) {
      Kind::take_line(first + d * step[0] + h * step[1], windows[2].count, step[2], count, sums);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) store_first(out + n * kWidth, sums[n].result(divisor), count);
}

// Calls reduce(N, channel, count) for channels: for kVectors vectors of them as long as there are so many, then for one.
// A constant `count` leaves no trace of the tail in the loop.
template <class Reduce>
XOPT_INLINE void each_channels(int64_t begin, int64_t end, const Reduce& reduce) {
  int64_t c = begin;
  for (; c + kChannelsAtOnce <= end; c += kChannelsAtOnce) {
    reduce(std::integral_constant<int, kVectors>(), c, kWidth);
  }
  for (; c + kWidth <= end; c += kWidth) reduce(std::integral_constant<int, 1>(), c, kWidth);
  if (c < end) reduce(std::integral_constant<int, 1>(), c, end - c);
}

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
// The largest of floats of 16 bits, 32 at a time, by their bits in an order: those of negative numbers are turned round, and
// all are counted from minus infinity on, so that NaN of either sign come last. An image of 64 x 112 x 112 in L2 takes 82 us
// so, and 124 as floats.
template <class T>
struct Words {
  static constexpr int64_t kLanes = 32;
  static constexpr int16_t kLowest = std::is_same_v<T, Bf16> ? int16_t(0x807f) : int16_t(0x83ff);  // minus infinity's

  static XOPT_INLINE __m512i turned(__m512i x) {
    return _mm512_xor_si512(x, _mm512_srli_epi16(_mm512_srai_epi16(x, 15), 1));
  }
  static XOPT_INLINE __m512i from(__m512i x) { return _mm512_sub_epi16(turned(x), _mm512_set1_epi16(kLowest)); }
  static XOPT_INLINE __m512i back(__m512i order) { return turned(_mm512_add_epi16(order, _mm512_set1_epi16(kLowest))); }
};

template <int N, class T>
XOPT_INLINE void largest(const T* first, const PoolWindow* windows, const int64_t* step, __mmask32 lanes, T* out) {
  __m512i most[N];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) most[n] = _mm512_setzero_si512();
  for (int64_t d = 0; d < windows[0].count; ++d) {
    for (int64_t h = 0; h < windows[1].count; ++h) {
      const T* x = first + d * step[0] + h * step[1];
      for (int64_t w = 0; w < windows[2].count; ++w, x += step[2]) {
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          const __m512i words = _mm512_maskz_loadu_epi16(lanes, x + n * Words<T>::kLanes);
          most[n] = _mm512_max_epu16(most[n], Words<T>::from(words));
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) _mm512_mask_storeu_epi16(out + n * Words<T>::kLanes, lanes, Words<T>::back(most[n]));
}

template <class T>
void largest_at(const T* first, int64_t channels, const PoolWindow* windows, const int64_t* step, T* out) {
  constexpr int64_t kLanes = Words<T>::kLanes;
  int64_t c = 0;
  for (; c + 2 * kLanes <= channels; c += 2 * kLanes) largest<2>(first + c, windows, step, ~__mmask32{0}, out + c);
  for (; c < channels; c += kLanes) {
    const int64_t left = channels - c;
    const __mmask32 lanes = left >= kLanes ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    largest<1>(first + c, windows, step, lanes, out + c);
  }
}
#endif

template <class Kind, class T>
void pool_position(const PoolCall& call, const T* image, const PoolWindow* windows, int64_t begin, int64_t end,
                   T* out) {
  const PatchesView& v = call.input;
  int64_t step[3];
  int64_t inside = 1, padded = 1;
  const T* first = image;
  for (int i = 0; i < 3; ++i) {
    step[i] = v.dilation[i] * v.in_stride[i];
    first += windows[i].first * v.in_stride[i];
    inside *= windows[i].count;
    padded *= windows[i].with_padding;
  }
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  if constexpr (std::is_same_v<Kind, Max> && sizeof(T) == 2) return largest_at(first, end, windows, step, out);
#endif
  const int64_t counted = call.divisor != 0 ? call.divisor : (call.counts_padding ? padded : inside);
  const F divisor = set1(static_cast<float>(counted));
  each_channels(begin, end, [&](auto vectors, int64_t c, int64_t count) {
    reduce<Kind, decltype(vectors)::value>(first + c, windows, step, count, divisor, out + c);
  });
}

// All pixels of images that are fewer than threads, as one: these share channels where there are many.
template <class Kind, class T>
void sum_by_channels(const PoolCall& call, int threads) {
  const PatchesView& v = call.input;
  const PoolWindow windows[3] = {pool_window(call, 0, 0), pool_window(call, 1, 0), pool_window(call, 2, 0)};
  const int64_t pieces = v.channels / kChannelsAtOnce;
  parallel(threads, [&](int thread, int count) {
    const int64_t begin = pieces * thread / count * kChannelsAtOnce;
    const int64_t end = thread + 1 == count ? v.channels : pieces * (thread + 1) / count * kChannelsAtOnce;
    for (int64_t image = 0; image < call.images; ++image) {
      const T* from = static_cast<const T*>(v.data) + image * v.image_stride;
      pool_position<Kind>(call, from, windows, begin, end, static_cast<T*>(call.out) + image * call.out_row_stride);
    }
  });
}

// Otherwise lines, whose sums are then added up as one thread would have.
template <class Kind, class T>
void sum_by_lines(const PoolCall& call, int threads) {
  const PatchesView& v = call.input;
  const int64_t height = v.in[1], lines = v.in[0] * height, channels = v.channels;
  const Scratch scratch(static_cast<size_t>(call.images * lines * channels) * sizeof(float));
  auto* const sums = scratch.as<float>();
  parallel(threads, [&](int thread, int count) {
    const int64_t all = call.images * lines;
    for (int64_t i = all * thread / count; i < all * (thread + 1) / count; ++i) {
      const int64_t depth = i % lines / height, line = i % height;
      const T* from = static_cast<const T*>(v.data) + i / lines * v.image_stride;
      from += depth * v.in_stride[0] + line * v.in_stride[1];
      each_channels(0, channels, [&](auto vectors, int64_t c, int64_t width) {
        constexpr int kCount = decltype(vectors)::value;
        Kind sum[kCount];
        Kind::take_line(from + c, v.in[2], v.in_stride[2], width, sum);
#pragma GCC unroll 4
        for (int n = 0; n < kCount; ++n) store_first(sums + i * channels + c + n * kWidth, sum[n].value, width);
      });
    }
  });
  const F divisor = set1(static_cast<float>(lines * v.in[2]));
  for (int64_t image = 0; image < call.images; ++image) {
    T* out = static_cast<T*>(call.out) + image * call.out_row_stride;
    for_each_vector(channels, [&](int64_t c, int64_t width) {
      Kind all;
      const float* sum = sums + image * lines * channels + c;
      for (int64_t line = 0; line < lines; ++line, sum += channels) all.value = add(all.value, load_first(sum, width));
      store_first(out + c, all.result(divisor), width);
    });
  }
}

template <class Kind, class T>
void pool_of(const PoolCall& call) {
  const PatchesView& v = call.input;
  const int64_t lines = call.images * v.out[0] * v.out[1];
  const int64_t values = lines * v.out[2] * v.channels * v.kernel[0] * v.kernel[1] * v.kernel[2];
  const int64_t most = minimum<int64_t>(max_threads(), values / kValuesOfAThread + 1);
  if constexpr (!std::is_same_v<Kind, Max>) {
    if (call.adaptive && lines * v.out[2] == call.images && call.images < most) {
      const int64_t by_lines = minimum(most, call.images * v.in[0] * v.in[1]);
      if (v.channels >= most * kChannelsAtOnce) return sum_by_channels<Kind, T>(call, static_cast<int>(most));
      return sum_by_lines<Kind, T>(call, static_cast<int>(by_lines));
    }
  }
  const int64_t threads = minimum(most, lines);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int64_t line = lines * thread / count; line < lines * (thread + 1) / count; ++line) {
      const int64_t image = line / (v.out[0] * v.out[1]);
      PoolWindow windows[3] = {
          pool_window(call, 0, line / v.out[1] % v.out[0]), pool_window(call, 1, line % v.out[1]), {}};
      const T* from = static_cast<const T*>(v.data) + image * v.image_stride;
      T* out = static_cast<T*>(call.out) + line * v.out[2] * call.out_row_stride;
      for (int64_t w = 0; w < v.out[2]; ++w, out += call.out_row_stride) {
        windows[2] = pool_window(call, 2, w);
        pool_position<Kind>(call, from, windows, 0, v.channels, out);
      }
    }
  });
}

template <class Kind>
void pool_kind(const PoolCall& call) {
  if (call.input.dtype == DType::f32) return pool_of<Kind, float>(call);
  return call.input.dtype == DType::bf16 ? pool_of<Kind, Bf16>(call) : pool_of<Kind, F16>(call);
}

void pool(const PoolCall& call) {
  if (call.kind == Pool::max) return pool_kind<Max>(call);
  return call.kind == Pool::average ? pool_kind<Average>(call) : pool_kind<Norm>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(pool, f32, pool);

}  // namespace xopt::XOPT_ISA
