// Nearest and linear interpolation. See upsample.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// With the channels last, what is mixed or copied is whole runs of channels: of two pixels, or of four or eight where
// several dimensions are mixed. The pixels around neighbouring outputs are the same or neighbours, so they come from L1.
// The last vector of a pixel's channels is a whole one too where pixels follow each other: what it writes too much is the
// next pixel's, which is written after it. So an image of 3 or 19 channels needs no loop over single values, but at the ends of its lines.
#include "kernels/upsample.h"

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/copy.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

// The input lines that an output line is mixed of.
template <class T>
struct Lines {
  int count = 0;
  const T* data[4];
  float weight[4];

  Lines(const UpsampleCall& call, const T* image, const Between& depth, const Between& height) {
    for (int d = 0; d <= static_cast<int>(call.mixed[0]); ++d) {
      for (int h = 0; h <= static_cast<int>(call.mixed[1]); ++h) {
        data[count] = image + depth.place[d] * call.input.in_stride[0] + height.place[h] * call.input.in_stride[1];
        weight[count++] = (call.mixed[0] ? depth.weight[d] : 1.0F) * (call.mixed[1] ? height.weight[h] : 1.0F);
      }
    }
  }
};

// `beyond`: how many values behind the channels may be read and written.
template <int N, class T>
XOPT_INLINE void mix(const T* const* pixels, const F* weights, int64_t channels, int64_t beyond, T* out) {
  const auto mixed = [&](int64_t c, int64_t count) {
    F sum = mul(load_first(pixels[0] + c, count), weights[0]);
#pragma GCC unroll 8
    for (int i = 1; i < N; ++i) sum = fma(load_first(pixels[i] + c, count), weights[i], sum);
    store_first(out + c, sum, count);
  };
  int64_t c = 0;
  for (; c + kWidth <= channels + beyond && c < channels; c += kWidth) mixed(c, kWidth);
  if (c < channels) mixed(c, channels - c);
}

// An output line of `kLines` input lines, of which `kPlaces` pixels each are mixed.
template <int kLines, int kPlaces, class T>
void mix_line(const UpsampleCall& call, const Lines<T>& lines, T* out) {
  const PatchesView& v = call.input;
  const bool follow = call.out_row_stride == v.channels;
  for (int64_t w = 0; w < v.out[2]; ++w, out += call.out_row_stride) {
    const Between& between = call.places[2][w];
    const T* pixels[kLines * kPlaces];
    F weights[kLines * kPlaces];
#pragma GCC unroll 8
    for (int i = 0; i < kLines * kPlaces; ++i) {
      const int line = i / kPlaces, place = i % kPlaces;
      pixels[i] = lines.data[line] + between.place[place] * v.in_stride[2];
      weights[i] = set1(kPlaces == 1 ? lines.weight[line] : lines.weight[line] * between.weight[place]);
    }
    const int64_t read = (v.in[2] - 1 - between.place[kPlaces - 1]) * v.in_stride[2];
    const int64_t written = follow ? (v.out[2] - 1 - w) * v.channels : 0;
    mix<kLines * kPlaces>(pixels, weights, v.channels, minimum(read, written), out);
  }
}

template <int kPlaces, class T>
void mix_lines(const UpsampleCall& call, const Lines<T>& lines, T* out) {
  if (lines.count == 1) return mix_line<1, kPlaces>(call, lines, out);
  return lines.count == 2 ? mix_line<2, kPlaces>(call, lines, out) : mix_line<4, kPlaces>(call, lines, out);
}

template <class T>
void copy_pixels(const UpsampleCall& call, const T* line, T* out) {
  const PatchesView& v = call.input;
  const int64_t bytes = v.channels * static_cast<int64_t>(sizeof(T));
  for (int64_t w = 0; w < v.out[2]; ++w, out += call.out_row_stride) {
    const T* pixel = line + call.places[2][w].place[0] * v.in_stride[2];
    copy_short(reinterpret_cast<const uint8_t*>(pixel), bytes, reinterpret_cast<uint8_t*>(out));
  }
}

template <class T>
void upsample_of(const UpsampleCall& call) {
  const PatchesView& v = call.input;
  const int64_t lines = call.images * v.out[0] * v.out[1], values = v.out[2] * v.channels;
  const int64_t wanted = lines * values / kValuesOfAThread + 1;
  const int64_t threads = minimum(minimum<int64_t>(max_threads(), lines), wanted);
  const bool nearest = !call.mixed[0] && !call.mixed[1] && !call.mixed[2];
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int64_t line = lines * thread / count; line < lines * (thread + 1) / count; ++line) {
      const T* image = static_cast<const T*>(v.data) + line / (v.out[0] * v.out[1]) * v.image_stride;
      const Between& depth = call.places[0][line / v.out[1] % v.out[0]];
      const Lines<T> from(call, image, depth, call.places[1][line % v.out[1]]);
      T* out = static_cast<T*>(call.out) + line * v.out[2] * call.out_row_stride;
      if (nearest) {
        copy_pixels(call, from.data[0], out);
      } else if (call.mixed[2]) {
        mix_lines<2>(call, from, out);
      } else {
        mix_lines<1>(call, from, out);
      }
    }
  });
}

void upsample(const UpsampleCall& call) {
  if (call.input.dtype == DType::f32) return upsample_of<float>(call);
  return call.input.dtype == DType::bf16 ? upsample_of<Bf16>(call) : upsample_of<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(upsample, f32, upsample);

}  // namespace xopt::XOPT_ISA
