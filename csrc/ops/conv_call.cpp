// See conv_call.h.
#include "ops/conv_call.h"

#include "ops/images.h"
#include "ops/tuned.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

Kernel<ConvFn> conv_f32("conv", "f32");
Kernel<ConvFn> conv_bf16("conv", "bf16");
Kernel<ConvFn> conv_f16("conv", "f16");
Kernel<ConvFn> conv_depthwise("conv_depthwise", "f32");

// Images and spatial dimensions as the rows of a matrix.
bool collapse_positions(const Tensor& tensor, RowsView* view) {
  int64_t sizes[4], strides[4];
  const int64_t count = tensor.dims() - 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t dim = i == 0 ? 0 : i + 1;
    sizes[i] = tensor.size(dim);
    strides[i] = tensor.stride(dim);
  }
  return collapse_rows(sizes, strides, count, view);
}

bool is_product(const PatchesView& view, const ConvLayout& layout) {
  bool plain = layout.groups == 1 && !layout.depthwise && layout.positions() == 1;
  for (int i = 0; i < 3; ++i) plain = plain && view.stride[i] == 1 && view.in[i] == view.out[i] && view.padding[i] == 0;
  return plain;
}

// `other`, of the output's sizes, as the epilogue reads it; replaced by a copy where it cannot.
void set_residual(const char* op, Tensor* other, const int64_t* sizes, int64_t dims, Epilogue* epilogue) {
  if (!*other) return;
  const Checked checked{op, "other", *other};
  checked.cpu();
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

}  // namespace

void check_conv_input(const char* op, const Tensor& input, int64_t dims, int64_t group_in, int64_t groups) {
  const Checked checked{op, "input", input};
  checked.cpu();
  checked.dtype(kFloating);
  if (input.dims() != dims + 2) {
    checked.fail("expected ", dims + 2, " dimensions [images, channels, spatial...] for this weight, got shape ",
                 input.shape_text());
  }
  if (input.size(1) != group_in * groups) {
    checked.fail("expected ", group_in * groups, " channels (", group_in, " for each of ", groups,
                 " groups), got shape ", input.shape_text());
  }
}

Tensor conv_output(const char* op, const Tensor& input, Tensor* bias, ConvAfter* after, const int64_t* sizes,
                   int64_t dims, Epilogue* epilogue) {
  const int64_t channels = sizes[1];
  epilogue->scale = column_vector(op, "scale", &after->scale, channels);
  epilogue->bias = column_vector(op, "bias", bias, channels);
  after->fused.set(op, epilogue);
  set_residual(op, &after->fused.other, sizes, dims, epilogue);
  epilogue->out_dtype = output_dtype(op, after->out_dtype, input, kFloating);
  Tensor out = Tensor::empty_channels_last(sizes, dims, epilogue->out_dtype);
  epilogue->out = out.mutable_data();
  epilogue->out_row_stride = channels;
  return out;
}

bool takes_any_layout(const PatchesView& view, const ConvLayout& layout) {
  constexpr int64_t kMostChannels = 16;
  return layout.products() == 1 && !layout.depthwise && layout.product_channels() <= kMostChannels &&
         !is_product(view, layout);
}

void run_conv(const ConvCall& call, const Tensor& input, const ConvLayout& layout) {
  RowsView rows;
  if (is_product(call.input, layout) && (input.numel() == 0 || collapse_positions(input, &rows))) {
    rows.data = call.input.data;
    rows.dtype = call.input.dtype;
    return run_gemm({call.images * output_positions(call.input), rows, call.weight, call.epilogue});
  }
  if (layout.depthwise) return conv_depthwise(call);
  switch (call.weight.dtype) {
    case DType::f32:
      return run_tuned(conv_f32, call);
    case DType::bf16:
      return run_tuned(conv_bf16, call);
    default:
      return run_tuned(conv_f16, call);
  }
}

}  // namespace xopt::ops
