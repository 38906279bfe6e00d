// See images.h.
#include "ops/images.h"

namespace xopt::ops {

bool is_dense_channels_last(const Tensor& image) {
  if (image.dims() < 3 || image.stride(1) != 1) return false;
  int64_t stride = image.size(1);
  for (int64_t dim = image.dims() - 1; dim >= 0; --dim) {
    if (dim == 1 || image.size(dim) == 1) continue;
    if (image.stride(dim) != stride) return false;
    stride *= image.size(dim);
  }
  return true;
}

void check_integers(const char* op, const char* name, const Integers& values, int64_t count, int64_t least) {
  constexpr int64_t kMostSize = int64_t{1} << 40;
  if (values.size() != count) fail(op, name, "expected ", count, " numbers, got ", values.size());
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < least || values[i] > kMostSize) {
      fail(op, name, "expected numbers of at least ", least, ", got ", values.text());
    }
  }
}

void set_input(Tensor* input, PatchesView* view, bool any_layout) {
  view->dtype = dtype_from_torch(input->dtype_code()).value_or(DType::f32);  // checked before
  if (input->numel() == 0) return;
  if (!is_channels_last(*input) && !any_layout) *input = input->channels_last_copy();
  view->data = input->data();
  view->image_stride = input->stride(0);
  view->channel_stride = is_channels_last(*input) ? 1 : input->stride(1);
  const int64_t dims = input->dims() - 2;
  for (int64_t i = 0; i < dims; ++i) view->in_stride[3 - dims + i] = input->stride(2 + i);
}

}  // namespace xopt::ops
