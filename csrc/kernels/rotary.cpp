// Rotary position embedding of queries and keys. See rotary.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Rows of one position share its angles, so all heads of a position are done by one thread, one after the other, with
// angles that were made floats once.
#include "kernels/rotary.h"

#include "kernels/rotary_pairs.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"
#include "tiles/view.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

// Of one position.
struct Turn {
  const float *cos, *sin;
  int64_t rotated;
};

template <class T>
void turn_halves(const T* x, T* out, const Turn& turn) {
  const float *cos = turn.cos, *sin = turn.sin;
  const int64_t half = turn.rotated / 2;
  const auto vector = [=](int64_t i, int64_t count) {
    const int64_t j = half + i;
    const F low = load_first(x + i, count), high = load_first(x + j, count);
    const F low_turned = sub(mul(low, load_first(cos + i, count)), mul(high, load_first(sin + i, count)));
    const F high_turned = fma(high, load_first(cos + j, count), mul(low, load_first(sin + j, count)));
    store_first(out + i, low_turned, count);
    store_first(out + j, high_turned, count);
  };
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) vector(i, kWidth);
  if (i < half) vector(i, half - i);
}

template <class T>
void turn_interleaved(const T* x, T* out, const Turn& turn) {
  const float *cos = turn.cos, *sin = turn.sin;
  const int64_t n = turn.rotated;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store_first(out + i, turn_pairs(x, cos, sin, i, kWidth), kWidth);
  if (i < n) store_first(out + i, turn_pairs(x, cos, sin, i, n - i), n - i);
}

// A thread's positions.
template <class T>
class Rotation {
 public:
  // `scratch`: twice the rotated columns.
  Rotation(const RotaryCall& call, float* scratch) : call_(call), cos_(scratch), sin_(scratch + call.rotated) {}

  void run(int64_t place) const {
    const int64_t batch = place / call_.positions, position = place % call_.positions;
    const Turn turn{as_floats(call_.cos, batch, position, cos_), as_floats(call_.sin, batch, position, sin_),
                    call_.rotated};
    for (const RotatedHeads& tensor : call_.tensors) {
      const T* x = static_cast<const T*>(tensor.data) + batch * tensor.batch_stride + position * tensor.row_stride;
      T* out = static_cast<T*>(tensor.out) + (batch * tensor.heads * call_.positions + position) * call_.depth;
      for (int64_t head = 0; head < tensor.heads; ++head) {
        turn_row(x + head * tensor.head_stride, out + head * call_.positions * call_.depth, turn);
      }
    }
  }

 private:
  void turn_row(const T* x, T* out, const Turn& turn) const {
    if (call_.interleaved) {
      turn_interleaved(x, out, turn);
    } else {
      turn_halves(x, out, turn);
    }
    const int64_t rest = call_.depth - call_.rotated;
    if (rest > 0) copy_bytes(x + call_.rotated, rest * static_cast<int64_t>(sizeof(T)), out + call_.rotated);
  }

  const float* as_floats(const Angles& angles, int64_t batch, int64_t position, float* to) const {
    const int64_t from = batch * angles.batch_stride + position * angles.row_stride, n = call_.rotated;
    if (angles.dtype == DType::f32) return static_cast<const float*>(angles.data) + from;
    for (int64_t i = 0; i < n; i += kWidth) {
      store_first(to + i, load_any(angles.data, angles.dtype, from + i, n - i), n - i);
    }
    return to;
  }

  const RotaryCall& call_;
  float *cos_, *sin_;
};

template <class T>
void rotate(const RotaryCall& call) {
  const int64_t places = call.batch * call.positions;
  const int64_t values = places * (call.tensors[0].heads + call.tensors[1].heads) * call.depth;
  const int64_t wanted = (values + kValuesOfAThread - 1) / kValuesOfAThread;
  const auto threads = static_cast<int>(minimum<int64_t>(minimum<int64_t>(max_threads(), places), wanted));
  parallel(threads, [&](int thread, int count) {
    const Scratch scratch(static_cast<size_t>(call.rotated) * 2 * sizeof(float));
    const Rotation<T> rotation(call, scratch.as<float>());
    const int64_t end = places * (thread + 1) / count;
    for (int64_t place = places * thread / count; place < end; ++place) rotation.run(place);
  });
}

void rotary(const RotaryCall& call) {
  if (call.dtype == DType::f32) return rotate<float>(call);
  return call.dtype == DType::bf16 ? rotate<Bf16>(call) : rotate<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(rotary, f32, rotary);

}  // namespace xopt::XOPT_ISA
