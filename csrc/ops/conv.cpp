// xopt::conv: convolutions of 1 to 3 spatial dimensions with a weight packed by conv_pack, and what follows them.
//
// Input and output are logically [images, channels, spatial...] and lie in memory with the channels last: an input that
// does not is copied first, the output always does.
#include "ops/conv_call.h"
#include "ops/images.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "conv";

struct ConvArguments {
  explicit ConvArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        weight_size(stack.integers()),
        bias(stack.optional_tensor()),
        stride(stack.integers()),
        padding(stack.integers()),
        dilation(stack.integers()),
        groups(stack.integer()),
        after(stack) {}

  Tensor input, packed;
  Integers weight_size;
  Tensor bias;
  Integers stride, padding, dilation;
  int64_t groups;
  ConvAfter after;
};

ConvLayout weight_layout(const ConvArguments& arguments) {
  const Integers& sizes = arguments.weight_size;
  return conv_layout(kOp, "weight_size", sizes.data(), sizes.size(), sizes.text(), arguments.groups);
}

// Everything about the input but its strides and data.
PatchesView geometry(const ConvArguments& arguments, const ConvLayout& layout) {
  const int64_t dims = layout.dims;
  check_integers(kOp, "stride", arguments.stride, dims, 1);
  check_integers(kOp, "padding", arguments.padding, 2 * dims, 0);
  check_integers(kOp, "dilation", arguments.dilation, dims, 1);
  PatchesView view;
  view.channels = layout.product_channels();
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i;
    view.in[at] = arguments.input.size(2 + i);
    view.kernel[at] = layout.kernel[at];
    view.stride[at] = arguments.stride[i];
    view.dilation[at] = arguments.dilation[i];
    view.padding[at] = arguments.padding[2 * i];
    int64_t extent = 0;
    const int64_t padded = view.in[at] + arguments.padding[2 * i] + arguments.padding[2 * i + 1];
    if (__builtin_mul_overflow(view.dilation[at], view.kernel[at] - 1, &extent) || padded <= extent) {
      fail(kOp, "input", "expected at least ", extent + 1, " elements, what the kernel spans, along spatial dimension ",
           i, ", got ", padded, " with padding");
    }
    view.out[at] = (padded - extent - 1) / view.stride[at] + 1;
  }
  return view;
}

}  // namespace

void conv(StableIValue* stack, uint64_t, uint64_t) {
  ConvArguments arguments{Stack(stack)};
  Tensor& input = arguments.input;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "scale", arguments.after.scale},
                     {kOp, "other", arguments.after.fused.other}});
  const ConvLayout layout = weight_layout(arguments);
  check_conv_input(kOp, input, layout.dims, layout.group_in, layout.groups);
  check_conv_packed(kOp, packed_header(kOp, arguments.packed), layout);
  ConvCall call{geometry(arguments, layout),
                input.size(0),
                layout.products(),
                layout.product_columns(),
                PackedWeight(arguments.packed.data()),
                {}};

  const int64_t dims = layout.dims + 2;
  int64_t sizes[5] = {call.images, layout.out};
  for (int64_t i = 0; i < layout.dims; ++i) sizes[2 + i] = call.input.out[3 - layout.dims + i];
  Tensor out = conv_output(kOp, input, &arguments.bias, &arguments.after, sizes, dims, &call.epilogue);
  if (out.numel() > 0) {
    set_input(&input, &call.input, takes_any_layout(call.input, layout));
    run_conv(call, input, layout);
  }
  return_tensor(stack, 0, std::move(out));
}

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "conv(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, int[] stride, int[] padding, "
      "int[] dilation, int groups=1, Tensor? scale=None, str activation=\"none\", float alpha=0., float beta=0., "
      "str binary=\"none\", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("conv", &conv); }

}  // namespace xopt::ops
