// Outputs of narrow groups of a convolution, of which several fill a vector (4 channels each of a ResNeXt, 8 of a RegNet, one
// channel for two outputs): summed as those of a depthwise convolution are (depthwise_sums.h), where each lane of a vector of
// outputs takes one of its group's channels after the other. As a product, whose panels hold several groups, most of what
// is multiplied would be the zeros between them.
#pragma once

#include "kernels/depthwise_sums.h"
#include "kernels/narrow_groups.h"

namespace xopt::XOPT_ISA {

// For each of the steps in which a vector of outputs takes its groups' channels, of one or of two that are multiplied as a
// pair, which lane's value it is for each lane.
class GroupLanes {
 public:
  GroupLanes(int64_t group_in, int64_t group_out, bool in_pairs)
      : in(group_in), out(group_out), pairs(in_pairs), steps(pairs ? in / 2 : in) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        lanes_[step][lane] = static_cast<int32_t>(lane / out * steps + step);
      }
    }
  }
  I of(int64_t step) const { return load_int(lanes_[step]); }

  const int64_t in, out;
  const bool pairs;
  const int64_t steps;

 private:
  alignas(64) int32_t lanes_[kWidth][kWidth];
};

// The first `count` values of a line, behind which there may be nothing, each where a lane wants it.
struct LaneValues {
  I lanes;
  int64_t count;

  template <class Line>
  XOPT_INLINE F at(const Line* p) const {
    return take_lanes(load_first(p, count), lanes);
  }
  static XOPT_INLINE F add(F sum, F value, F weight) { return fma(value, weight, sum); }
};

#if XOPT_LINES_IN_PAIRS
struct LanePairs {
  I lanes;
  int64_t count;

  XOPT_INLINE F at(const Bf16* p) const {
    const auto all = static_cast<__mmask16>(-1);
    const __mmask16 inside = count >= kWidth ? all : static_cast<__mmask16>((1U << count) - 1);
    const __m256i words = _mm256_maskz_loadu_epi16(inside, p);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi32(lanes, _mm512_castsi256_si512(words)));
  }
  // Not the intrinsic: GCC 12 copies its sum before each product.
  static XOPT_INLINE F add(F sum, F pairs, F weights) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(weights));
    return sum;
  }
};
#endif

// Outputs of the channels of their group.
template <class Values>
struct GroupChannels {
  template <int64_t K, int64_t S, bool Folds, class Line>
  static XOPT_INLINE void sum(const OutputsCall<Line>& call, const EightOutputs<Line>& outputs, int64_t c,
                              F (&acc)[kOutputs]) {
    begin_sums<Folds>(call, c, acc);
    const int64_t channel = c / call.groups->out * call.groups->in, left = call.channels - channel;
    const int64_t x = outputs.values + channel, weight = weight_of(call, c);
    if (left >= kWidth) {
      add<K, S>(call, outputs, x, weight, kWidth, acc);  // a constant leaves no trace of the tail in the loop
    } else {
      add<K, S>(call, outputs, x, weight, left, acc);
    }
  }

 private:
  template <int64_t K, int64_t S, class Line>
  static XOPT_INLINE void add(const OutputsCall<Line>& call, const EightOutputs<Line>& outputs, int64_t x,
                              int64_t weight, int64_t count, F (&acc)[kOutputs]) {
    const KernelLine<Line>* end = call.lines + call.line_count;
    for (const auto* line = call.lines; line != end; ++line) {
      const float* weights = line->weights + weight;
      for (int64_t step = 0; step < call.groups->steps; ++step, weights += call.kernel * kTileColumns) {
        const Values values{call.groups->of(step), count};
        add_kernel_line<K, S>(call, outputs, line->values + x, weights, values, acc);
      }
    }
  }
};

template <class Values, class Line>
OutputsFn<Line>* select_narrow_of(const PatchesView& v, bool finish) {
  const int64_t kernel = v.dilation[2] == 1 ? v.kernel[2] : 0, stride = v.stride[2];
  if (kernel == 3 && stride == 1) return outputs_fn_of<GroupChannels<Values>, 3, 1, Line>(finish);
  if (kernel == 3 && stride == 2) return outputs_fn_of<GroupChannels<Values>, 3, 2, Line>(finish);
  return outputs_fn_of<GroupChannels<Values>, 0, 0, Line>(finish);
}

// Whether a group's channels are multiplied in pairs.
inline bool multiplies_pairs(const ConvCall& call) {
  const bool are_bf16 = call.input.dtype == DType::bf16 && call.weight.dtype == DType::bf16;
  return XOPT_LINES_IN_PAIRS && are_bf16 && call.group_in > 0 && call.group_in % 2 == 0;
}

template <class Line>
OutputsFn<Line>* select_narrow(const PatchesView& v, [[maybe_unused]] const GroupLanes& groups, bool finish) {
#if XOPT_LINES_IN_PAIRS
  if constexpr (std::is_same_v<Line, Bf16>) {
    if (groups.pairs) return select_narrow_of<LanePairs, Line>(v, finish);
  }
#endif
  return select_narrow_of<LaneValues, Line>(v, finish);
}

}  // namespace xopt::XOPT_ISA
