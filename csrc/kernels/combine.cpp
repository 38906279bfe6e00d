// Two tensors, element by element. See combine.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// A run goes along the innermost dimension. Where its values lie is counted from the last one's as long as only the
// dimension around it changes: an image times a factor of each channel has as many runs as pixels.
#include "kernels/combine.h"

#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/layout.h"
#include "tiles/row_loops.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int64_t kValuesOfAThread = 4096;  // fewer are not worth waking another thread
constexpr int64_t kPiece = 64;              // values that no two threads share: whole vectors and lines of the cache
constexpr int kInner = CombineCall::kDims - 1, kAround = kInner - 1;

enum class How : uint8_t { add, sub, from, mul };  // from: the second minus the first

template <How H>
XOPT_INLINE F combined(F x, F y) {
  if constexpr (H == How::sub) return sub(x, y);
  if constexpr (H == How::from) return sub(y, x);
  return H == How::add ? add(x, y) : mul(x, y);
}

bool comes_second(const CombineCall& call) { return call.parts[0].stride[kInner] == 0; }

template <class T, How H>
class Runs {
 public:
  explicit Runs(const CombineCall& call)
      : call_(call),
        runs_(1),
        lowest_(set1(call.relu ? 0.0F : -__builtin_inff())),
        // What is the same for all of a run comes second; `H` says which is taken off which.
        first_(call.parts[comes_second(call) ? 1 : 0]),
        second_(call.parts[comes_second(call) ? 0 : 1]) {
    for (int dim = 0; dim < kInner; ++dim) runs_ *= call.size[dim];
  }

  int64_t count() const { return runs_; }

  // Elements [from, until) of runs [begin, end).
  void compute(int64_t begin, int64_t end, int64_t from, int64_t until) const {
    const int64_t around = call_.size[kAround];
    for (int64_t run = begin; run < end;) {
      const T* first = start(first_, run) + from * first_.stride[kInner];
      const T* second = start(second_, run) + from * second_.stride[kInner];
      T* out = static_cast<T*>(call_.out) + place(call_.out_stride, run) + from;
      const int64_t line_end = minimum(end, run + around - run % around);
      for (; run < line_end; ++run) {
        compute_run(first, second, until - from, out);
        first += first_.stride[kAround];
        second += second_.stride[kAround];
        out += call_.out_stride[kAround];
      }
    }
  }

 private:
  // Of a run's first element.
  int64_t place(const int64_t (&stride)[CombineCall::kDims], int64_t run) const {
    int64_t at = 0;
    for (int dim = kAround; dim >= 0 && run > 0; --dim) {
      at += run % call_.size[dim] * stride[dim];
      run /= call_.size[dim];
    }
    return at;
  }
  const T* start(const CombineCall::Part& part, int64_t run) const {
    return static_cast<const T*>(part.data) + place(part.stride, run);
  }

  void compute_run(const T* first, const T* second, int64_t count, T* out) const {
    const int64_t first_step = first_.stride[kInner], second_step = second_.stride[kInner];
    if (first_step == 1 && second_step == 1) {
      return write(count, out, [=](int64_t i, int64_t c) { return load_first(second + i, c); }, first);
    }
    if (first_step == 1 && second_step == 0) {
      const F one = first_value(second);
      return write(count, out, [=](int64_t, int64_t) { return one; }, first);
    }
    for (int64_t i = 0; i < count; ++i) {
      const F x = load_first(first + i * first_step, 1), y = load_first(second + i * second_step, 1);
      store_first(out + i, max(lowest_, combined<H>(x, y)), 1);
    }
  }

  template <class Other>
  XOPT_INLINE void write(int64_t count, T* out, const Other& other, const T* first) const {
    const F lowest = lowest_;
    for_each_vector(count, [=](int64_t i, int64_t c) {
      store_first(out + i, max(lowest, combined<H>(load_first(first + i, c), other(i, c))), c);
    });
  }

  // In all lanes.
  static F first_value(const T* value) {
    float lanes[kWidth];
    store(lanes, load_first(value, 1));
    return set1(lanes[0]);
  }

  const CombineCall& call_;
  int64_t runs_;
  const F lowest_;
  const CombineCall::Part& first_;
  const CombineCall::Part& second_;
};

template <class T, How H>
void combine_in(const CombineCall& call) {
  const Runs<T, H> runs(call);
  const int64_t length = call.size[kInner], values = runs.count() * length;
  const int threads = static_cast<int>(minimum<int64_t>(max_threads(), values / kValuesOfAThread + 1));
  parallel(threads, [&](int thread, int count) {
    if (runs.count() >= count) {
      return runs.compute(runs.count() * thread / count, runs.count() * (thread + 1) / count, 0, length);
    }
    // Few long ones: of each a piece.
    const int64_t pieces = ceil_div(length, kPiece);
    const int64_t from = pieces * thread / count * kPiece, until = pieces * (thread + 1) / count * kPiece;
    runs.compute(0, runs.count(), from, minimum(until, length));
  });
}

template <class T>
void combine_of(const CombineCall& call) {
  if (call.how == Combine::add) return combine_in<T, How::add>(call);
  if (call.how == Combine::mul) return combine_in<T, How::mul>(call);
  return comes_second(call) ? combine_in<T, How::from>(call) : combine_in<T, How::sub>(call);
}

void combine(const CombineCall& call) {
  if (call.dtype == DType::f32) return combine_of<float>(call);
  return call.dtype == DType::bf16 ? combine_of<Bf16>(call) : combine_of<F16>(call);
}

}  // namespace

XOPT_REGISTER_KERNEL(combine, f32, combine);

}  // namespace xopt::XOPT_ISA
