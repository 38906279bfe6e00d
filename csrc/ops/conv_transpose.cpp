// xopt::conv_transpose: transposed convolutions of 1 to 3 spatial dimensions with a weight packed by
// conv_transpose_pack, and what follows them.
//
// Each phase (conv_phases.h) is a convolution whose outputs lie apart, so nothing is scattered or added up in memory.
// Input and output lie with their channels last, as those of xopt::conv do.
#include "ops/conv_call.h"
#include "ops/conv_phases.h"
#include "ops/images.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "conv_transpose";

struct ConvTransposeArguments {
  explicit ConvTransposeArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        weight_size(stack.integers()),
        bias(stack.optional_tensor()),
        stride(stack.integers()),
        padding(stack.integers()),
        output_padding(stack.integers()),
        dilation(stack.integers()),
        groups(stack.integer()),
        after(stack) {}

  Tensor input, packed;
  Integers weight_size;
  Tensor bias;
  Integers stride, padding, output_padding, dilation;
  int64_t groups;
  ConvAfter after;
};

struct Geometry {
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, padding[3] = {0, 0, 0};
};

Geometry geometry(const ConvTransposeArguments& arguments, const ConvPhases& phases) {
  const int64_t dims = phases.dims;
  check_integers(kOp, "padding", arguments.padding, dims, 0);
  check_integers(kOp, "output_padding", arguments.output_padding, dims, 0);
  Geometry g;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i, stride = phases.stride[at], dilation = phases.dilation[at];
    const int64_t extra = arguments.output_padding[i];
    if (extra >= stride && extra >= dilation) {
      fail(kOp, "output_padding", "expected numbers smaller than the stride or the dilation, got ",
           arguments.output_padding.text());
    }
    g.in[at] = arguments.input.size(2 + i);
    g.padding[at] = arguments.padding[i];
    int64_t spread = 0;
    if (g.in[at] < 1) fail(kOp, "input", "expected at least 1 element along spatial dimension ", i, ", got 0");
    if (__builtin_mul_overflow(g.in[at] - 1, stride, &spread)) spread = INT64_MAX / 4;
    g.out[at] = spread + dilation * (phases.kernel[at] - 1) + extra + 1 - 2 * g.padding[at];
    if (g.out[at] < 1) {
      fail(kOp, "padding", "expected numbers that leave an output, got ", arguments.padding.text(),
           ", with which size ", g.out[at], " is left of spatial dimension ", i);
    }
  }
  return g;
}

// The output positions of a phase, and the convolution that they are.
struct PhasePlace {
  PatchesView view;
  int64_t first[3];  // output position
};

PhasePlace phase_place(const ConvPhases& phases, const ConvPhase& phase, const Geometry& g, const PatchesView& input) {
  PhasePlace place{input, {}};
  place.view.channels = phase.layout.product_channels();
  for (int at = 0; at < 3; ++at) {
    const int64_t stride = phases.stride[at];
    const Taps& taps = phase.taps[at];
    const int64_t first = ((taps.residue - g.padding[at]) % stride + stride) % stride;
    // Where the first tap meets the input for that position; the last one is the first of the reversed kernel.
    const int64_t meets = (first + g.padding[at] - taps.first * phases.dilation[at]) / stride;
    place.first[at] = first;
    place.view.in[at] = g.in[at];
    place.view.out[at] = first < g.out[at] ? (g.out[at] - 1 - first) / stride + 1 : 0;
    place.view.kernel[at] = taps.count;
    place.view.dilation[at] = phases.tap_dilation[at];
    place.view.padding[at] = (taps.count - 1) * phases.tap_dilation[at] - meets;
  }
  return place;
}

// The positions of a phase, from the first of which on the output is written and the residual read.
OutPositions phase_positions(const ConvPhases& phases, const PhasePlace& place, const Tensor& out, Epilogue* epilogue) {
  OutPositions positions{};
  positions.image_stride = out.stride(0);
  int64_t first = 0;
  for (int at = 0; at < 3; ++at) {
    const int64_t dim = at - 1 + phases.dims, stride = dim < 2 ? 0 : out.stride(dim);
    positions.size[at] = place.view.out[at];
    positions.stride[at] = phases.stride[at] * stride;
    first += place.first[at] * stride;
  }
  epilogue->out = static_cast<uint8_t*>(epilogue->out) + first * dtype_size(epilogue->out_dtype);
  if (epilogue->other != nullptr) {
    epilogue->other = static_cast<const uint8_t*>(epilogue->other) + first * dtype_size(epilogue->other_dtype);
  }
  return positions;
}

// What positions without taps hold, an empty sum and what follows it, for all positions.
void fill(const Tensor& out, const Epilogue& epilogue, DType packed_dtype) {
  alignas(64) PackedHeader header;
  packed_header_init(&header, packed_dtype, out.size(1), 0, false, false);
  run_gemm({out.numel() / out.size(1), {}, PackedWeight(&header), epilogue});
}

void run_phases(const ConvTransposeArguments& arguments, const ConvPhases& phases, const Geometry& g,
                const PatchesView& input, DType packed_dtype, const Epilogue& epilogue, const Tensor& out) {
  if (!phases.cover_all) fill(out, epilogue, packed_dtype);
  const std::vector<int64_t> offsets = phase_offsets(kOp, phases, packed_dtype);
  const auto* packed = static_cast<const uint8_t*>(arguments.packed.data());
  for (size_t i = 0; i < phases.phases.size(); ++i) {
    const ConvLayout& layout = phases.phases[i].layout;
    const PhasePlace place = phase_place(phases, phases.phases[i], g, input);
    if (output_positions(place.view) == 0) continue;
    ConvCall call{
        place.view, out.size(0), layout.products(), layout.product_columns(), PackedWeight(packed + offsets[i]),
        epilogue};
    const OutPositions positions = phase_positions(phases, place, out, &call.epilogue);
    call.epilogue.positions = &positions;
    run_or_plan(ready_conv(call, arguments.input, layout));
  }
}

ConvPhases phases_of(const ConvTransposeArguments& arguments) {
  const Integers& sizes = arguments.weight_size;
  return conv_phases(kOp, "weight_size", sizes.view(), arguments.groups, arguments.stride, arguments.dilation);
}

void conv_transpose(StableIValue* stack, uint64_t, uint64_t) {
  ConvTransposeArguments arguments{Stack(stack)};
  Tensor &input = arguments.input, &other = arguments.after.fused.other;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "scale", arguments.after.scale},
                     {kOp, "other", other}});
  const ConvPhases phases = phases_of(arguments);
  check_conv_input(kOp, input, phases.dims, phases.group_in(), phases.groups);
  const DType packed_dtype = packed_phases_dtype(kOp, arguments.packed, phases);
  const Geometry g = geometry(arguments, phases);

  const int64_t dims = phases.dims + 2, channels = phases.out();
  int64_t sizes[5] = {input.size(0), channels};
  for (int64_t i = 0; i < phases.dims; ++i) sizes[2 + i] = g.out[3 - phases.dims + i];
  Epilogue epilogue{};
  arguments.after.set(kOp, input, channels, &epilogue);
  Tensor out = conv_output(kOp, &arguments.bias, &arguments.after.fused, sizes, dims, &epilogue);
  if (epilogue.other != nullptr && epilogue.other_row_stride != channels) {  // positions are those of the output
    other = other.channels_last_copy();
    epilogue.other = other.data();
    epilogue.other_row_stride = channels;
  }
  if (out.numel() > 0) {
    PatchesView view;
    set_input(&input, &view);
    run_phases(arguments, phases, g, view, packed_dtype, epilogue, out);
  }
  return_tensor(stack, 0, std::move(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "conv_transpose(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, int[] stride, "
      "int[] padding, int[] output_padding, int[] dilation, int groups=1, Tensor? scale=None, "
      "str activation=\"none\", float alpha=0., float beta=0., str binary=\"none\", Tensor? other=None, "
      "bool activation_last=False, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("conv_transpose", &conv_transpose); }

}  // namespace xopt::ops
