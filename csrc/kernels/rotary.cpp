// Rotary position embedding of queries and keys. See rotary.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Rows of one position share its angles, so all heads of a position are done by one thread, one after the other.
#include "kernels/rotary.h"

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/any_dtype.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 16384;  // fewer are not worth waking another thread

struct RowOfAngles {
  Angles angles;
  int64_t offset;

  XOPT_INLINE F load(int64_t index, int64_t count) const {
    return load_any(angles.data, angles.dtype, offset + index, count);
  }
};

RowOfAngles row_of(const Angles& angles, int64_t batch, int64_t position) {
  return {angles, batch * angles.batch_stride + position * angles.row_stride};
}

void rotate_row(const RotaryCall& call, const void* x, int64_t from, void* out, int64_t to, const RowOfAngles& cos,
                const RowOfAngles& sin) {
  const int64_t half = call.depth / 2;
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t count = half - i;
    const F low = load_any(x, call.dtype, from + i, count);
    const F high = load_any(x, call.dtype, from + half + i, count);
    const F low_turned = sub(mul(low, cos.load(i, count)), mul(high, sin.load(i, count)));
    const F high_turned = fma(high, cos.load(half + i, count), mul(low, sin.load(half + i, count)));
    store_any(out, call.dtype, to + i, low_turned, count);
    store_any(out, call.dtype, to + half + i, high_turned, count);
  }
}

void rotate_position(const RotaryCall& call, int64_t batch, int64_t position) {
  const RowOfAngles cos = row_of(call.cos, batch, position), sin = row_of(call.sin, batch, position);
  for (const RotatedHeads& tensor : call.tensors) {
    for (int64_t head = 0; head < tensor.heads; ++head) {
      const int64_t from = batch * tensor.batch_stride + head * tensor.head_stride + position * tensor.row_stride;
      const int64_t to = ((batch * tensor.heads + head) * call.positions + position) * call.depth;
      rotate_row(call, tensor.data, from, tensor.out, to, cos, sin);
    }
  }
}

void rotary(const RotaryCall& call) {
  const int64_t places = call.batch * call.positions;
  const int64_t values = places * (call.tensors[0].heads + call.tensors[1].heads) * call.depth;
  const int64_t wanted = (values + kValuesOfAThread - 1) / kValuesOfAThread;
  const auto threads = static_cast<int>(minimum<int64_t>(minimum<int64_t>(max_threads(), places), wanted));
  parallel(threads, [&](int thread, int count) {
    const int64_t end = places * (thread + 1) / count;
    for (int64_t place = places * thread / count; place < end; ++place) {
      rotate_position(call, place / call.positions, place % call.positions);
    }
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(rotary, f32, rotary);

}  // namespace xopt::XOPT_ISA
