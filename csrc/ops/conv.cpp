// xopt::conv: convolutions of 1 to 3 spatial dimensions with a weight packed by conv_pack, and what follows them.
//
// Input and output are logically [images, channels, spatial...] and lie in memory with the channels last: an input that
// does not is copied first, the output always does.
#include "ops/conv_bands.h"
#include "ops/conv_call.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "conv";

struct ConvArguments {
  explicit ConvArguments(Stack stack)
      : input(stack.tensor()),
        packed(stack.tensor()),
        weight_size(stack.integers()),
        bias(stack.optional_tensor()),
        geometry(stack),
        after(stack) {}

  Tensor input, packed;
  Integers weight_size;
  Tensor bias;
  ConvGeometry geometry;
  ConvAfter after;
};

ConvLayout weight_layout(const ConvArguments& arguments) {
  const Integers& sizes = arguments.weight_size;
  return conv_layout(kOp, "weight_size", sizes.view(), arguments.geometry.groups);
}

void note(const ReadyConv& conv, const ConvArguments& arguments) {
  NotedCall* noted = note_call(&run_ready, conv);
  if (noted == nullptr) return;
  const Epilogue& epilogue = conv.call.epilogue;
  noted->reads(conv.call.input.data, arguments.input);
  noted->reads(conv.rows.data, arguments.input);
  noted->reads(conv.call.weight, arguments.packed);
  noted->reads(epilogue.bias.data, arguments.bias);
  noted->reads(epilogue.scale.data, arguments.after.scale);
  noted->reads(epilogue.other, arguments.after.fused.other);
  noted->writes(epilogue.out, 0);
}

Tensor conv(Stack stack) {
  ConvArguments arguments{stack};
  Tensor& input = arguments.input;
  check_no_gradient({{kOp, "input", input},
                     {kOp, "bias", arguments.bias},
                     {kOp, "scale", arguments.after.scale},
                     {kOp, "other", arguments.after.fused.other}});
  const ConvLayout layout = weight_layout(arguments);
  check_conv_input(kOp, input, layout.dims, layout.group_in, layout.groups);
  const PackedHeader header = packed_header(kOp, arguments.packed);
  check_conv_packed(kOp, header, layout);
  ConvCall call{arguments.geometry.view(kOp, input, layout),
                input.size(0),
                layout.products(),
                layout.product_columns(),
                PackedWeight(header, arguments.packed.data()),
                {}};
  arguments.after.set(kOp, input, layout.out, &call.epilogue);
  Tensor out = complete_call(kOp, &input, &arguments.bias, &arguments.after.fused, layout, &call);
  if (out.numel() == 0) return out;
  const ReadyConv ready = ready_conv(call, input, layout);
  note(ready, arguments);
  run_or_plan(ready);
  if (PlannedConvs* planned = PlannedConvs::current()) {
    for (Tensor* read : {&input, &arguments.bias, &arguments.after.scale, &arguments.after.fused.other}) {
      planned->keep(std::move(*read));
    }
  }
  return out;
}

const ChainableOp chainable("conv", &conv);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "conv(Tensor input, Tensor packed, int[] weight_size, Tensor? bias=None, *, int[] stride, int[] padding, "
      "int[] dilation, int groups=1, Tensor? scale=None, str activation=\"none\", float alpha=0., float beta=0., "
      "str binary=\"none\", Tensor? other=None, bool activation_last=False, ScalarType? out_dtype=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("conv", &boxed<conv>); }
STABLE_TORCH_LIBRARY_IMPL(xopt, XPU, library) { library.impl("conv", &on_xpu<boxed<conv>>); }

}  // namespace xopt::ops
