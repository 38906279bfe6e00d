// xopt::window_partition and xopt::window_merge: images [images, height, width, channels] as windows
// [images, down, across, height, width, channels] and back, with the padding and the roll before and after that.
#include "kernels/windows.h"

#include "ops/images.h"
#include "ops/prepared.h"
#include "runtime/registry.h"
#include "tiles/layout.h"

namespace xopt::ops {
namespace {

Kernel<WindowsFn> windows_kernel("windows", "f32");

DType check_input(const Checked& input, int64_t dims, const char* shape) {
  check_no_gradient({input});
  input.cpu();
  const DType dtype = input.dtype(kEveryDType);
  if (input.tensor.dims() != dims) {
    input.fail("expected ", dims, " dimensions ", shape, ", got shape ", input.tensor.shape_text());
  }
  return dtype;
}

// Where the windows begin in the padded image, if `shift` is how far the image is rolled before it is cut up, or after
// it was put together.
void set_first(WindowsCall* call, const Integers& shift) {
  for (int i = 0; i < 2; ++i) {
    const int64_t size = call->count[i] * call->size[i];
    const int64_t rolled = size == 0 ? 0 : (shift[i] % size + size) % size;
    call->first[i] = call->merges || rolled == 0 ? rolled : size - rolled;
  }
}

void set_image(WindowsCall* call, const Tensor& image, DType dtype) {
  const int64_t bytes = dtype_size(dtype);
  call->images = image.size(0);
  call->image_stride = image.stride(0) * bytes;
  for (int i = 0; i < 2; ++i) {
    call->inside[i] = image.size(1 + i);
    call->stride[i] = image.stride(1 + i) * bytes;
  }
  call->pixel_bytes = image.size(3) * bytes;
}

void check_shift(const char* op, const Integers& shift) {
  if (shift.size() != 2) fail(op, "shift", "expected 2 numbers, got ", shift.size());
}

Tensor window_partition(Stack arguments) {
  constexpr const char* kOp = "window_partition";
  Tensor image = arguments.tensor();
  const Integers window = arguments.integers(), shift = arguments.integers();
  const DType dtype = check_input({kOp, "image", image}, 4, "[images, height, width, channels]");
  check_integers(kOp, "window", window, 2, 1);
  check_shift(kOp, shift);

  if (image.size(3) > 1 && image.stride(3) != 1) image = image.contiguous_copy();
  WindowsCall call{};
  set_image(&call, image, dtype);
  for (int i = 0; i < 2; ++i) {
    call.size[i] = window[i];
    call.count[i] = ceil_div(call.inside[i], window[i]);
  }
  set_first(&call, shift);
  const int64_t sizes[] = {call.images, call.count[0], call.count[1], call.size[0], call.size[1], image.size(3)};
  Tensor out = Tensor::empty(sizes, 6, dtype);
  if (out.numel() > 0) {
    call.from = image.data();
    call.to = out.mutable_data();
    windows_kernel(call);
  }
  return out;
}

Tensor window_merge(Stack arguments) {
  constexpr const char* kOp = "window_merge";
  Tensor windows = arguments.tensor();
  const Integers size = arguments.integers(), shift = arguments.integers();
  const DType dtype = check_input({kOp, "windows", windows}, 6, "[images, down, across, height, width, channels]");
  check_integers(kOp, "size", size, 2, 0);
  check_shift(kOp, shift);

  WindowsCall call{};
  call.merges = true;
  for (int i = 0; i < 2; ++i) {
    call.count[i] = windows.size(1 + i);
    call.size[i] = windows.size(3 + i);
    if (size[i] > call.count[i] * call.size[i]) {
      fail(kOp, "size", "expected at most ", call.count[i] * call.size[i], ", what the windows cover, got ", size[i]);
    }
  }
  set_first(&call, shift);
  const int64_t sizes[] = {windows.size(0), size[0], size[1], windows.size(5)};
  Tensor out = Tensor::empty(sizes, 4, dtype);
  if (out.numel() > 0) {
    if (!windows.is_contiguous()) windows = windows.contiguous_copy();
    set_image(&call, out, dtype);
    call.from = windows.data();
    call.to = out.mutable_data();
    windows_kernel(call);
  }
  return out;
}

const ChainableOp chainable_partition("window_partition", &window_partition),
    chainable_merge("window_merge", &window_merge);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("window_partition(Tensor image, int[] window, int[] shift) -> Tensor");
  library.def("window_merge(Tensor windows, int[] size, int[] shift) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("window_partition", &boxed<&window_partition>);
  library.impl("window_merge", &boxed<&window_merge>);
}

}  // namespace xopt::ops
