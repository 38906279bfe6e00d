// Which groups of a convolution are narrow: several fill a vector. "conv" hands them to "conv_depthwise" (narrow_sums.h).
#pragma once

#include <type_traits>

#include "kernels/conv.h"
#include "runtime/registry.h"
#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// Whether they are taken of inputs of this type. Weights may be fp32 as well.
template <class T>
inline constexpr bool kTakesNarrow =
    XOPT_LEVEL >= XOPT_LEVEL_AVX2 && (std::is_same_v<T, float> || std::is_same_v<T, Bf16>);

// Whether groups fill vectors of outputs, each of which needs no more channels than one vector has. Those of 16 are better
// off as products, which leave out the zeros between them.
inline bool has_narrow_groups(const ConvCall& call) {
  const int64_t in = call.group_in, out = call.group_out;
  const bool fills = in > 0 && in <= out && in < kTileColumns && kWidth % out == 0;
  return fills && (call.products == 1 || call.product_columns == kPanelColumns);
}

// Whether they are narrow, and have been computed.
inline bool conv_narrow(const ConvCall& call) {
  static Kernel<ConvFn> kernel("conv_depthwise", "f32");
  const DType input = call.input.dtype, weight = call.weight.dtype;
  const bool taken = (input == DType::f32 && kTakesNarrow<float>) || (input == DType::bf16 && kTakesNarrow<Bf16>);
  const bool multiplied = (weight == input || weight == DType::f32) && call.input.channel_stride == 1;
  if (!taken || !multiplied || !has_narrow_groups(call) || call.tuning.path == TunedPath::patches) return false;
  kernel(call);
  return true;
}

}  // namespace xopt::XOPT_ISA
