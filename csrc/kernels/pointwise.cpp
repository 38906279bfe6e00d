// Some steps of arithmetic, element by element. See pointwise.h.
// isa: scalar avx2 avx512 avx512_bf16
//
// Memory is what it waits for, so each value is read and written once: up to 512 elements at a time go through all steps,
// with what lies between in L1. Which step it is, and of which dtype, is asked once for all of them. A pass through L1
// costs a vector 2 to 3 cycles: floats are read where they are, what is the same in each row is read once, and the last
// step writes the result.
#include "kernels/pointwise.h"

#include "kernels/convert.h"
#include "kernels/each_activation.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"
#include "tiles/layout.h"
#include "tiles/math.h"
#include "tiles/row_loops.h"

namespace xopt::XOPT_ISA {
namespace {

using Operand = PointwiseCall::Operand;
using Step = PointwiseCall::Step;

constexpr int64_t kValuesOfAThread = 8192;  // fewer are not worth waking another thread
constexpr int64_t kBlock = 512;
constexpr int64_t kStep = 2 * kWidth;      // of a loop
constexpr int64_t kRoom = kBlock + kStep;  // loops go on to the end of a step
constexpr int kDims = PointwiseCall::kDims, kInner = kDims - 1;

float value_of(float value) { return value; }
float value_of(Bf16 value) { return bits_float(f32_bits_from_bf16(value.bits)); }
float value_of(F16 value) { return bits_float(f32_bits_from_f16(value.bits)); }

// How the elements of the result are cut: into pieces of a run, which is the innermost dimension, or into whole runs.
struct Cut {
  explicit Cut(const PointwiseCall& call) : length(call.size[kInner]), runs(1) {
    for (int dim = 0; dim < kInner; ++dim) runs *= call.size[dim];
    pieces = ceil_div(length, kBlock);
    piece = pieces > 1 ? round_up(ceil_div(length, pieces), kStep) : length;
    pieces = ceil_div(length, piece);
    runs_of_block = pieces > 1 ? 1 : maximum<int64_t>(1, kBlock / length);
  }
  int64_t blocks() const { return ceil_div(runs, runs_of_block) * pieces; }

  int64_t length, runs, pieces, piece, runs_of_block;
};

// Floats, or a number: then all vectors are the same one.
struct Values {
  const float* data;
  int64_t step;  // from vector to vector
};

// Which of an input's values are at hand.
struct Fetched {
  bool operator==(const Fetched& other) const { return from == other.from && run == other.run && count == other.count; }

  int64_t from = 0, run = 0, count = 0;
};

class Blocks {
 public:
  Blocks(const PointwiseCall& call, const Cut& cut)
      : call_(call),
        cut_(cut),
        scratch_(static_cast<size_t>((call.input_count + call.step_count) * kRoom + 2 * call.step_count * kWidth) *
                 sizeof(float)),
        steps_(scratch_.as<float>() + call.input_count * kRoom),
        numbers_(steps_ + call.step_count * kRoom) {
    for (int i = 0; i < call.step_count; ++i) {
      for (int j = 0; j < 2; ++j) store(number(i, j), set1(call.steps[i].operands[j].number));
    }
    for (int i = 0; i < call.input_count; ++i) {
      repeats_[i] = dense_[i] = true;
      int64_t elements = 1;
      for (int dim = kInner; dim >= 0; elements *= call.size[dim], --dim) {
        const int64_t stride = call.inputs[i].stride[dim];
        if (dim < kInner && stride != 0) repeats_[i] = false;
        if (call.size[dim] != 1 && stride != elements) dense_[i] = false;
      }
    }
    // What is behind the values that inputs have given is computed with, too.
    __builtin_memset(scratch_.as<float>(), 0, static_cast<size_t>(call.input_count * kRoom) * sizeof(float));
  }

  void compute(int64_t block) {
    const int64_t run = block / cut_.pieces * cut_.runs_of_block, from = block % cut_.pieces * cut_.piece;
    const int64_t runs = minimum(cut_.runs_of_block, cut_.runs - run);
    const int64_t count = runs * minimum(cut_.piece, cut_.length - from), begin = run * cut_.length + from;
    for (int i = 0; i < call_.input_count; ++i) {
      // What has been there for the block before, or at the same place of a run before that.
      const Fetched here{from, repeats_[i] ? 0 : run, count};
      if (fetched_[i] == here) continue;
      float* room = scratch_.as<float>() + i * kRoom;
      inputs_[i] = dense_[i] ? fetch_dense(call_.inputs[i], begin, count, room)
                             : fetch_runs(call_.inputs[i], run, from, count, room);
      fetched_[i] = here;
    }
    if (call_.out_dtype == DType::f32) return run_all<false>(count, static_cast<float*>(call_.out) + begin);
    if (call_.out_dtype == DType::bf16) return run_all<true>(count, static_cast<Bf16*>(call_.out) + begin);
    run_all<false>(count, static_cast<F16*>(call_.out) + begin);
  }

 private:
  float* number(int step, int operand) const { return numbers_ + (2 * step + operand) * kWidth; }

  // An input's values of a block, where they lie as those of the result do.
  Values fetch_dense(const PointwiseCall::Input& input, int64_t begin, int64_t count, float* to) const {
    const bool goes_on = begin + round_up(count, kStep) <= cut_.runs * cut_.length;
    if (input.dtype == DType::f32 && goes_on) return {static_cast<const float*>(input.data) + begin, kWidth};
    copy_any(input, begin, 1, count, to);
    return {to, kWidth};
  }

  // Where they lie otherwise: whole runs, or a piece of one.
  Values fetch_runs(const PointwiseCall::Input& input, int64_t run, int64_t from, int64_t count, float* to) const {
    const int64_t step = input.stride[kInner];
    int64_t place[kDims], at = from * step;
    for (int dim = kInner - 1; dim >= 0; --dim) {
      place[dim] = call_.size[dim] == 1 ? 0 : run % call_.size[dim];
      if (call_.size[dim] != 1) run /= call_.size[dim];
      at += place[dim] * input.stride[dim];
    }
    const int64_t length = minimum(count, cut_.length);
    if (length == count && step == 1 && input.dtype == DType::f32 && count % kStep == 0) {
      return {static_cast<const float*>(input.data) + at, kWidth};
    }
    for (int64_t done = 0; done < count; done += length) {
      copy_any(input, at, step, length, to + done);
      for (int dim = kInner - 1; dim >= 0; --dim) {
        at += input.stride[dim];
        if (++place[dim] < call_.size[dim]) break;
        at -= place[dim] * input.stride[dim];
        place[dim] = 0;
      }
    }
    return {to, kWidth};
  }

  static void copy_any(const PointwiseCall::Input& input, int64_t at, int64_t step, int64_t length, float* to) {
    if (input.dtype == DType::f32) return copy_run(static_cast<const float*>(input.data) + at, step, length, to);
    if (input.dtype == DType::bf16) return copy_run(static_cast<const Bf16*>(input.data) + at, step, length, to);
    copy_run(static_cast<const F16*>(input.data) + at, step, length, to);
  }

  // Whole vectors are stored, since the next run goes over what is too much.
  template <class T>
  static void copy_run(const T* from, int64_t step, int64_t length, float* to) {
    if (step == 1) {
      return for_each_vector(length, [&](int64_t i, int64_t c) { store(to + i, load_first(from + i, c)); });
    }
    if (step == 0) {
      store(to, load_first(from, 1));
      const F all = set1(to[0]);
      return for_each_vector(length, [&](int64_t i, int64_t) { store(to + i, all); });
    }
    for (int64_t i = 0; i < length; ++i, from += step) to[i] = value_of(*from);
  }

  Values operand(int step, int which) const {
    const Operand& operand = call_.steps[step].operands[which];
    switch (operand.in) {
      case Operand::In::input:
        return inputs_[operand.place];
      case Operand::In::step:
        return {steps_ + operand.place * kRoom, kWidth};
      default:
        return {number(step, which), 0};
    }
  }

  // Rough: what becomes bf16, which rounds ten times as much away.
  template <bool Rough, class Out>
  void run_all(int64_t count, Out* out) const {
    const int last = call_.step_count - 1;
    for (int i = 0; i < last; ++i) run<Rough>(i, 0, count, steps_ + i * kRoom);
    const int64_t whole = count / kStep * kStep;
    run<Rough>(last, 0, whole, out);
    if (whole == count) return;
    float* rest = steps_ + last * kRoom;
    run<Rough>(last, whole, count, rest);
    for_each_vector(count - whole, [&](int64_t i, int64_t c) { store_first(out + whole + i, load(rest + i), c); });
  }

  template <bool Rough, class Out>
  void run(int place, int64_t from, int64_t until, Out* out) const {
    const Step& step = call_.steps[place];
    const Values x = operand(place, 0), y = operand(place, 1);
    const auto each = [=](const auto& of) {
      // In locals: a store might change what is captured.
      const int64_t a_step = x.step, b_step = y.step, end = until;
      const float *a = x.data + from / kWidth * a_step, *b = y.data + from / kWidth * b_step;
      Out* to = out;
      for (int64_t i = from; i < end; i += kStep, a += 2 * a_step, b += 2 * b_step, to += kStep) {
        const F first = of(load(a), load(b)), second = of(load(a + a_step), load(b + b_step));
        store_first(to, first, kWidth);
        store_first(to + kWidth, second, kWidth);
      }
    };
    switch (step.how) {
      case PointwiseStep::add:
        return each([](F a, F b) { return add(a, b); });
      case PointwiseStep::sub:
        return each([](F a, F b) { return sub(a, b); });
      case PointwiseStep::mul:
        return each([](F a, F b) { return mul(a, b); });
      case PointwiseStep::div:
        return each([](F a, F b) { return div(a, b); });
      case PointwiseStep::abs:
        return each([](F a, F) { return abs(a); });
      case PointwiseStep::sqrt:
        return each([](F a, F) { return sqrt(a); });
      case PointwiseStep::exp:
        return each([](F a, F) { return exp(a); });
      case PointwiseStep::softplus:
        return each([](F a, F) { return softplus(a); });
      case PointwiseStep::activation:
        return activate_each<Rough>(step, each);
    }
  }

  template <bool Rough, class Each>
  static void activate_each(const Step& step, const Each& each) {
    const F alpha = set1(step.alpha), beta = set1(step.beta);
    switch (step.activation) {
#define XOPT_ACTIVATE_CASE(NAME) \
  case Activation::NAME:         \
    return each([=](F a, F) { return activate<Activation::NAME, Rough>(a, alpha, beta); });
      XOPT_EACH_ACTIVATION(XOPT_ACTIVATE_CASE)
#undef XOPT_ACTIVATE_CASE
    }
  }

  const PointwiseCall& call_;
  const Cut& cut_;
  Scratch scratch_;  // of each input and step a block's values, and the numbers
  float *steps_, *numbers_;
  Values inputs_[PointwiseCall::kMostInputs] = {};
  Fetched fetched_[PointwiseCall::kMostInputs] = {};
  bool repeats_[PointwiseCall::kMostInputs];  // whether all runs have the same values
  bool dense_[PointwiseCall::kMostInputs];    // whether they lie as the result's
};

void pointwise(const PointwiseCall& call) {
  const Cut cut(call);
  const int64_t blocks = cut.blocks();
  const int64_t threads = minimum<int64_t>(max_threads(), cut.runs * cut.length / kValuesOfAThread + 1);
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    Blocks mine(call, cut);
    for (int64_t block = blocks * thread / count; block < blocks * (thread + 1) / count; ++block) mine.compute(block);
  });
}

}  // namespace

XOPT_REGISTER_KERNEL(pointwise, f32, pointwise);

}  // namespace xopt::XOPT_ISA
