// xopt::qconv: convolutions of an int8 input with an int8 weight packed by conv_pack_int8, dequantised, and what follows
// them. Padding counts as real zeros, whatever the input's zero point. Layouts are those of xopt::conv.
#include "ops/conv_call.h"
#include "ops/quantization.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "qconv";

struct QConvArguments {
  explicit QConvArguments(Stack stack)
      : input(stack.tensor()),
        input_scale(stack.tensor()),
        input_zero_point(stack.optional_tensor()),
        packed(stack.tensor()),
        weight_size(stack.integers()),
        bias(stack.optional_tensor()),
        geometry(stack),
        fused(stack),
        out_dtype(stack.dtype_code()),
        output_scale(stack.number()),
        output_zero_point(stack.integer()) {}

  Tensor input, input_scale, input_zero_point, packed;
  Integers weight_size;
  Tensor bias;
  ConvGeometry geometry;
  FusedArguments fused;
  int32_t out_dtype;
  double output_scale;
  int64_t output_zero_point;
};

// Padding is made of zero points, so they have to be values of the input.
void check_zero_point(int32_t zero_point, bool is_signed) {
  const int32_t lowest = is_signed ? -128 : 0, highest = lowest + 255;
  if (zero_point < lowest || zero_point > highest) {
    fail(kOp, "input_zero_point", "expected ", lowest, " to ", highest, ", a value of the input's dtype, got ",
         zero_point);
  }
}

void qconv(StableIValue* stack, uint64_t, uint64_t) {
  QConvArguments arguments{Stack(stack)};
  Tensor& input = arguments.input;
  check_no_gradient({{kOp, "input_scale", arguments.input_scale},
                     {kOp, "bias", arguments.bias},
                     {kOp, "other", arguments.fused.other}});
  const Integers& sizes = arguments.weight_size;
  const ConvLayout layout = conv_layout(kOp, "weight_size", sizes.view(), arguments.geometry.groups);
  check_conv_input(kOp, input, layout.dims, layout.group_in, layout.groups, {DType::u8, DType::s8});
  check_conv_packed(kOp, packed_header(kOp, arguments.packed), layout, true);
  ConvCall call{arguments.geometry.view(kOp, input, layout),
                input.size(0),
                layout.products(),
                layout.product_columns(),
                PackedWeight(arguments.packed.data()),
                {}};
  Epilogue& epilogue = call.epilogue;
  epilogue.row_scale = input_parameter<float>(kOp, "input_scale", arguments.input_scale, DType::f32);
  if (arguments.input_zero_point) {
    epilogue.row_zero_point = input_parameter<int32_t>(kOp, "input_zero_point", arguments.input_zero_point, DType::s32);
    call.input.zero = *epilogue.row_zero_point;
    check_zero_point(call.input.zero, input.dtype_code() == torch_codes().s8);
  }
  const DType out_dtype =
      parse_dtype(kOp, "out_dtype", arguments.out_dtype, {DType::f32, DType::bf16, DType::f16, DType::s8, DType::u8});
  set_output_type(kOp, out_dtype, arguments.output_scale, arguments.output_zero_point, &epilogue);

  Tensor out = complete_call(kOp, &input, &arguments.bias, &arguments.fused, layout, &call);
  if (out.numel() > 0) run_or_plan(ready_conv(call, input, layout));
  return_tensor(stack, 0, std::move(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "qconv(Tensor input, Tensor input_scale, Tensor? input_zero_point, Tensor packed, int[] weight_size, "
      "Tensor? bias=None, *, int[] stride, int[] padding, int[] dilation, int groups=1, str activation=\"none\", "
      "float alpha=0., float beta=0., str binary=\"none\", Tensor? other=None, bool activation_last=False, "
      "ScalarType out_dtype=float, float output_scale=1., int output_zero_point=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("qconv", &qconv); }

}  // namespace xopt::ops
