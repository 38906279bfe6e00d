// See conv_call.h.
#include "ops/conv_call.h"

#include "kernels/pool.h"
#include "ops/conv_bands.h"
#include "ops/images.h"
#include "ops/joins.h"
#include "ops/tuned.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

Kernel<ConvFn> conv_f32("conv", "f32");
Kernel<ConvFn> conv_bf16("conv", "bf16");
Kernel<ConvFn> conv_f16("conv", "f16");
Kernel<ConvFn> conv_s8s8("conv", "s8s8");
Kernel<ConvFn> conv_u8s8("conv", "u8s8");
Kernel<ConvFn> conv_depthwise_f32("conv_depthwise", "f32");
Kernel<ConvFn> conv_depthwise_s8s8("conv_depthwise", "s8s8");
Kernel<ConvFn> conv_depthwise_u8s8("conv_depthwise", "u8s8");
Kernel<PoolFn> pool_f32("pool", "f32");

bool is_product(const PatchesView& view, const ConvLayout& layout) {
  bool plain = layout.groups == 1 && !layout.depthwise && layout.positions() == 1;
  for (int i = 0; i < 3; ++i) plain = plain && view.stride[i] == 1 && view.in[i] == view.out[i] && view.padding[i] == 0;
  return plain;
}

// `other`, of the output's sizes, as the epilogue reads it; replaced by a copy where it cannot.
void set_residual(const char* op, Tensor* other, const int64_t* sizes, int64_t dims, Epilogue* epilogue) {
  if (!*other) return;
  const Checked checked{op, "other", *other};
  checked.in_place();
  epilogue->other_dtype = checked.dtype(kFloating);
  bool same = other->dims() == dims;
  for (int64_t dim = 0; same && dim < dims; ++dim) same = other->size(dim) == sizes[dim];
  if (!same) {
    std::string expected;
    for (int64_t dim = 0; dim < dims; ++dim) expected += (dim == 0 ? "" : ", ") + std::to_string(sizes[dim]);
    checked.fail("expected the output's shape [", expected, "], got ", other->shape_text());
  }
  if (other->numel() == 0) return;
  RowsView rows;
  const int64_t count = other->numel() / other->size(1);
  if (!is_channels_last(*other) || !collapse_positions(*other, &rows) || rows.inner_rows != count) {
    *other = other->channels_last_copy();
    collapse_positions(*other, &rows);
  }
  epilogue->other = other->data();
  epilogue->other_row_stride = rows.row_stride;
}

// Whether the kernel takes an input's channels from anywhere: where they are few, it copies them side by side itself.
bool takes_any_layout(const ConvCall& call, const ConvLayout& layout) {
  return layout.merged == layout.groups && !layout.depthwise && layout.product_channels() <= kMostChannelsApart &&
         call.weight.dtype != DType::s8 && !is_product(call.input, layout);
}

// The product of the rest as a call of its own, whose rows of the packed matrix have channels of their own number.
ConvCall rest_call(const ReadyConv& conv) {
  ConvCall rest = conv.call;
  const int64_t columns = rest.products * rest.product_columns;
  const int64_t packed_column = rest.products * round_up(rest.product_columns, kPanelColumns);
  PatchesView& v = rest.input;
  v.data = static_cast<const uint8_t*>(v.data) + rest.products * v.channels * dtype_size(v.dtype);
  v.channels = conv.rest_groups * rest.group_in;
  rest.products = 1;
  rest.product_columns = conv.rest_groups * rest.group_out;
  rest.weight = rest.weight.columns(packed_column, rest.product_columns);
  rest.weight.k = v.kernel[0] * v.kernel[1] * v.kernel[2] * v.channels;
  rest.weight.k_tiles = ceil_div(rest.weight.k, packed_tile_k(rest.weight.dtype));
  rest.epilogue = rest.epilogue.from_column(columns);
  return rest;
}

void run_products(const ConvCall& call) {
  switch (call.weight.dtype) {
    case DType::s8:
      return run_tuned(call.input.dtype == DType::s8 ? conv_s8s8 : conv_u8s8, call);
    case DType::f32:
      return run_tuned(conv_f32, call);
    case DType::bf16:
      return run_tuned(conv_bf16, call);
    default:
      return run_tuned(conv_f16, call);
  }
}

void run_depthwise(const ConvCall& call) {
  if (call.weight.dtype != DType::s8) return run_tuned(conv_depthwise_f32, call);
  run_tuned(call.input.dtype == DType::s8 ? conv_depthwise_s8s8 : conv_depthwise_u8s8, call);
}

}  // namespace

bool collapse_positions(const Tensor& image, RowsView* view) {
  int64_t sizes[4], strides[4];
  const int64_t count = image.dims() - 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t dim = i == 0 ? 0 : i + 1;
    sizes[i] = image.size(dim);
    strides[i] = image.stride(dim);
  }
  return collapse_rows(sizes, strides, count, view);
}

void check_conv_input(const char* op, const Tensor& input, int64_t dims, int64_t group_in, int64_t groups,
                      std::initializer_list<DType> dtypes) {
  const Checked checked{op, "input", input};
  checked.in_place();
  checked.dtype(dtypes);
  if (input.dims() != dims + 2) {
    checked.fail("expected ", dims + 2, " dimensions [images, channels, spatial...] for this weight, got shape ",
                 input.shape_text());
  }
  if (input.size(1) != group_in * groups) {
    checked.fail("expected ", group_in * groups, " channels (", group_in, " for each of ", groups,
                 " groups), got shape ", input.shape_text());
  }
}

PatchesView ConvGeometry::view(const char* op, const Tensor& input, const ConvLayout& layout) const {
  const int64_t dims = layout.dims;
  check_integers(op, "stride", stride, dims, 1);
  check_integers(op, "padding", padding, 2 * dims, 0);
  check_integers(op, "dilation", dilation, dims, 1);
  PatchesView view;
  view.channels = layout.product_channels();
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t at = 3 - dims + i;
    view.in[at] = input.size(2 + i);
    view.kernel[at] = layout.kernel[at];
    view.stride[at] = stride[i];
    view.dilation[at] = dilation[i];
    view.padding[at] = padding[2 * i];
    int64_t extent = 0;
    const int64_t padded = view.in[at] + padding[2 * i] + padding[2 * i + 1];
    if (__builtin_mul_overflow(view.dilation[at], view.kernel[at] - 1, &extent) || padded <= extent) {
      fail(op, "input", "expected at least ", extent + 1, " elements, what the kernel spans, along spatial dimension ",
           i, ", got ", padded, " with padding");
    }
    view.out[at] = (padded - extent - 1) / view.stride[at] + 1;
  }
  return view;
}

void ConvAfter::set(const char* op, const Tensor& input, int64_t channels, Epilogue* epilogue) {
  epilogue->scale = column_vector(op, "scale", &scale, channels);
  epilogue->out_dtype = output_dtype(op, out_dtype, input, kFloating);
}

Tensor conv_output(const char* op, Tensor* bias, FusedArguments* fused, const int64_t* sizes, int64_t dims,
                   Epilogue* epilogue) {
  const int64_t channels = sizes[1];
  epilogue->bias = column_vector(op, "bias", bias, channels);
  fused->set(op, epilogue);
  set_residual(op, &fused->other, sizes, dims, epilogue);
  Tensor out = WantedOutput::take(sizes, dims, epilogue->out_dtype);
  epilogue->out = out.mutable_data();
  epilogue->out_row_stride = dims > 2 ? out.stride(dims - 1) : channels;
  return out;
}

Tensor complete_call(const char* op, Tensor* input, Tensor* bias, FusedArguments* fused, const ConvLayout& layout,
                     ConvCall* call) {
  int64_t sizes[5] = {call->images, layout.out};
  for (int64_t i = 0; i < layout.dims; ++i) sizes[2 + i] = call->input.out[3 - layout.dims + i];
  Tensor out = conv_output(op, bias, fused, sizes, layout.dims + 2, &call->epilogue);
  if (out.numel() > 0) set_input(input, &call->input, takes_any_layout(*call, layout));
  return out;
}

ReadyConv ready_conv(const ConvCall& call, const Tensor& input, const ConvLayout& layout) {
  ReadyConv conv{call, layout.depthwise};
  if (layout.groups > 1 && !layout.depthwise) {
    conv.call.group_in = layout.group_in;
    conv.call.group_out = layout.group_out();
  }
  conv.rest_groups = layout.rest();
  conv.is_product = is_product(call.input, layout) && (input.numel() == 0 || collapse_positions(input, &conv.rows));
  conv.rows.data = call.input.data;
  conv.rows.dtype = call.input.dtype;
  return conv;
}

void run_or_plan(const ReadyConv& conv) {
  if (PlannedConvs* planned = PlannedConvs::current()) return planned->add(conv);
  run_ready(conv);
}

void run_ready(const ReadyConv& conv) {
  const ConvCall& call = conv.call;
  if (conv.is_max_pool) {
    PoolCall pool{};
    pool.kind = Pool::max;
    pool.input = call.input;
    pool.images = call.images;
    pool.out = call.epilogue.out;
    pool.out_row_stride = call.epilogue.out_row_stride;
    return pool_f32(pool);
  }
  if (conv.is_product) {
    return run_gemm({call.images * output_positions(call.input), conv.rows, call.weight, call.epilogue});
  }
  if (conv.depthwise) return run_depthwise(call);
  run_products(call);
  if (conv.rest_groups > 0) run_products(rest_call(conv));
}

}  // namespace xopt::ops
