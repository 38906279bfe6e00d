// Pooling. See pool.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A window's values lie at a constant distance for each channel, so a vector of channels is reduced in registers, four
// of them at a time; the windows of an output line follow each other, and what they share is in L1.
#include "kernels/pool.h"

#include <type_traits>

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kVectors = 4;              // of channels, reduced at once
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
  XOPT_INLINE void end_line() {}
  XOPT_INLINE F result(F) const { return add(value, nan); }
};

struct Average {
  F value = set1(0.0F);
  F line = set1(0.0F);  // sums of sums, since one of a whole image's values would round as often as there are values

  XOPT_INLINE void take(F x) { line = add(line, x); }
  XOPT_INLINE void end_line() {
    value = add(value, line);
    line = set1(0.0F);
  }
  XOPT_INLINE F result(F divisor) const { return div(value, divisor); }
};

template <class Kind, int N, class T>
XOPT_INLINE void reduce(const T* first, const PoolWindow* windows, const int64_t* step, int64_t count, F divisor,
                        T* out) {
  Kind sums[N];
  for (int64_t d = 0; d < windows[0].count; ++d) {
    for (int64_t h = 0; h < windows[1].count; ++h) {
      const T* x = first + d * step[0] + h * step[1];
      for (int64_t w = 0; w < windows[2].count; ++w, x += step[2]) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[n].take(load_first(x + n * kWidth, count));
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n].end_line();
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) store_first(out + n * kWidth, sums[n].result(divisor), count);
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
void pool_position(const PoolCall& call, const T* image, const PoolWindow* windows, T* out) {
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
  if constexpr (std::is_same_v<Kind, Max> && sizeof(T) == 2) return largest_at(first, v.channels, windows, step, out);
#endif
  const int64_t counted = call.divisor != 0 ? call.divisor : (call.counts_padding ? padded : inside);
  const F divisor = set1(static_cast<float>(counted));
  int64_t c = 0;
  for (; c + kVectors * kWidth <= v.channels; c += kVectors * kWidth) {
    reduce<Kind, kVectors>(first + c, windows, step, kWidth, divisor, out + c);
  }
  for (; c + kWidth <= v.channels; c += kWidth) reduce<Kind, 1>(first + c, windows, step, kWidth, divisor, out + c);
  if (c < v.channels) reduce<Kind, 1>(first + c, windows, step, v.channels - c, divisor, out + c);
}

template <class Kind, class T>
void pool_of(const PoolCall& call) {
  const PatchesView& v = call.input;
  const int64_t lines = call.images * v.out[0] * v.out[1];
  const int64_t values = lines * v.out[2] * v.channels * v.kernel[0] * v.kernel[1] * v.kernel[2];
  const int64_t threads = minimum(minimum<int64_t>(max_threads(), lines), values / kValuesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int64_t line = lines * thread / count; line < lines * (thread + 1) / count; ++line) {
      const int64_t image = line / (v.out[0] * v.out[1]);
      PoolWindow windows[3] = {
          pool_window(call, 0, line / v.out[1] % v.out[0]), pool_window(call, 1, line % v.out[1]), {}};
      const T* from = static_cast<const T*>(v.data) + image * v.image_stride;
      T* out = static_cast<T*>(call.out) + line * v.out[2] * v.channels;
      for (int64_t w = 0; w < v.out[2]; ++w, out += v.channels) {
        windows[2] = pool_window(call, 2, w);
        pool_position<Kind>(call, from, windows, out);
      }
    }
  });
}

template <class Kind>
void pool_kind(const PoolCall& call) {
  if (call.input.dtype == DType::f32) return pool_of<Kind, float>(call);
  return call.input.dtype == DType::bf16 ? pool_of<Kind, Bf16>(call) : pool_of<Kind, F16>(call);
}

void pool(const PoolCall& call) { return call.kind == Pool::max ? pool_kind<Max>(call) : pool_kind<Average>(call); }

}  // namespace

XOPT_REGISTER_KERNEL(pool, f32, pool);

}  // namespace xopt::XOPT_ISA
