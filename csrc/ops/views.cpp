// Views of tensors, as calls of a chain: what steps of a program do between operators without computing anything. They
// are named as torch's methods, take what those take, and are no operators of their own, since torch has them.
#include <algorithm>
#include <optional>

#include "ops/images.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

constexpr int64_t kMostDims = Integers::kMost;

// The sizes and strides of a view.
struct Dims {
  int64_t count = 0;
  int64_t sizes[kMostDims] = {};
  int64_t strides[kMostDims] = {};

  void add(int64_t size, int64_t stride) {
    sizes[count] = size;
    strides[count] = stride;
    ++count;
  }
  Tensor of(const Tensor& tensor, int64_t first_element = 0) const {
    return tensor.view(sizes, strides, count, first_element);
  }
};

void check_dims(const char* op, const Tensor& tensor, int64_t most) {
  if (tensor.dims() <= most) return;
  fail(op, "input", "expected at most ", most, " dimensions, got shape ", tensor.shape_text());
}

Tensor reference(const Tensor& tensor) { return Tensor(tensor.share()); }

// ---- Other sizes ---------------------------------------------------------------------------------------------------

// With the one size that was left open.
Dims sizes_of(const char* op, const Tensor& tensor, const Integers& given) {
  if (given.size() > kMostDims) fail(op, "shape", "expected at most ", kMostDims, " dimensions, got ", given.size());
  Dims dims;
  int64_t known = 1;
  std::optional<int64_t> open;
  for (int64_t i = 0; i < given.size(); ++i) {
    if (given[i] == -1 && !open) {
      open = i;
    } else {
      known *= given[i];
    }
    dims.add(given[i], 0);
  }
  const int64_t elements = tensor.numel();
  if (open && known > 0) dims.sizes[*open] = elements / known;
  const int64_t count = open ? known * dims.sizes[*open] : known;
  bool fits = count == elements && (!open || known > 0);
  for (int64_t i = 0; i < dims.count; ++i) fits &= dims.sizes[i] >= 0;
  if (!fits) fail(op, "shape", "expected sizes for the elements of ", tensor.shape_text(), ", got ", given.text());
  return dims;
}

// Finds strides for new sizes over the same memory; false where those take a copy. From the innermost on, dimensions
// that lie as one run are taken up together, and new ones have to divide what is left of a run.
bool find_strides(const Tensor& tensor, Dims* dims) {
  int64_t next = tensor.dims() - 1, left = 1, stride = 1;
  for (int64_t i = dims->count - 1; i >= 0; --i) {
    if (left == 1 && dims->sizes[i] != 1) {
      while (next >= 0 && tensor.size(next) == 1) --next;
      if (next < 0) return false;
      left = tensor.size(next);
      stride = tensor.stride(next);
      const int64_t innermost = stride;
      for (--next; next >= 0; --next) {
        if (tensor.size(next) != 1 && tensor.stride(next) != innermost * left) break;
        left *= tensor.size(next);
      }
    }
    if (left % dims->sizes[i] != 0) return false;
    dims->strides[i] = stride;
    stride *= dims->sizes[i];
    left /= dims->sizes[i];
  }
  // One image is as far from the next as it would be among several: by a stride within it, which torch gives and nothing
  // is read by, joins would not take it for one whose channels are last.
  if (dims->count >= 4 && dims->sizes[0] == 1) {
    for (int64_t i = 1; i < dims->count; ++i) {
      dims->strides[0] = std::max(dims->strides[0], dims->sizes[i] * dims->strides[i]);
    }
  }
  return true;
}

void set_row_major(Dims* dims) {
  int64_t stride = 1;
  for (int64_t i = dims->count - 1; i >= 0; --i) {
    dims->strides[i] = stride;
    stride *= dims->sizes[i] > 1 ? dims->sizes[i] : 1;
  }
}

Tensor with_sizes(const Tensor& tensor, Dims dims) {
  if (tensor.numel() == 0 || tensor.is_contiguous()) {
    set_row_major(&dims);
    return dims.of(tensor);
  }
  if (find_strides(tensor, &dims)) return dims.of(tensor);
  set_row_major(&dims);
  return dims.of(tensor.contiguous_copy());
}

Tensor reshape(Stack stack) {
  const Tensor tensor = stack.tensor();
  const Integers shape = stack.integers();
  return with_sizes(tensor, sizes_of("reshape", tensor, shape));
}

Tensor flatten(Stack stack) {
  constexpr const char* kOp = "flatten";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t first = dim_of(kOp, "start_dim", stack.integer(), tensor.dims());
  const int64_t last = dim_of(kOp, "end_dim", stack.integer(), tensor.dims());
  Dims dims;
  for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
    if (dim > first && dim <= last) {
      dims.sizes[dims.count - 1] *= tensor.size(dim);
    } else {
      dims.add(tensor.size(dim), 0);
    }
  }
  return with_sizes(tensor, dims);
}

Tensor contiguous(Stack stack) {
  const Tensor tensor = stack.tensor();
  return tensor.is_contiguous() ? reference(tensor) : tensor.contiguous_copy();
}

Tensor unflatten(Stack stack) {
  constexpr const char* kOp = "unflatten";
  const Tensor tensor = stack.tensor();
  const int64_t unflattened = dim_of(kOp, "dim", stack.integer(), tensor.dims());
  const Integers given = stack.integers();
  Integers sizes;
  for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
    if (dim != unflattened) sizes.add(tensor.size(dim));
    for (int64_t i = 0; dim == unflattened && i < given.size(); ++i) sizes.add(i < Integers::kMost ? given[i] : 0);
  }
  return with_sizes(tensor, sizes_of(kOp, tensor, sizes));
}

Tensor contiguous_unless_channels_last(Stack stack) {
  const Tensor tensor = stack.tensor();
  return tensor.is_contiguous() || is_dense_channels_last(tensor) ? reference(tensor) : tensor.contiguous_copy();
}

Tensor channels_last(Stack stack) {
  const Tensor image = stack.tensor();
  if (image.dims() < 3) fail("channels_last", "image", "expected at least 3 dimensions, got ", image.shape_text());
  return is_channels_last(image) ? reference(image) : image.channels_last_copy();
}

const ChainableView chainable_unflatten("unflatten", &unflatten),
    chainable_unless("contiguous_unless_channels_last", &contiguous_unless_channels_last),
    chainable_channels_last("channels_last", &channels_last);
const ChainableView chainable_reshape("reshape", &reshape), chainable_flatten("flatten", &flatten),
    chainable_contiguous("contiguous", &contiguous);

// ---- Other strides -------------------------------------------------------------------------------------------------

Tensor permute(Stack stack) {
  constexpr const char* kOp = "permute";
  const Tensor tensor = stack.tensor();
  const Integers order = stack.integers();
  check_dims(kOp, tensor, kMostDims);
  Dims dims;
  uint64_t seen = 0;
  for (int64_t i = 0; i < order.size() && i < kMostDims; ++i) {
    const int64_t dim = dim_of(kOp, "dims", order[i], tensor.dims());
    seen |= uint64_t{1} << dim;
    dims.add(tensor.size(dim), tensor.stride(dim));
  }
  if (order.size() != tensor.dims() || seen + 1 != uint64_t{1} << tensor.dims()) {
    fail(kOp, "dims", "expected each of ", tensor.dims(), " dimensions, got ", order.text());
  }
  return dims.of(tensor);
}

Tensor transpose(Stack stack) {
  constexpr const char* kOp = "transpose";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t first = dim_of(kOp, "dim0", stack.integer(), tensor.dims());
  const int64_t second = dim_of(kOp, "dim1", stack.integer(), tensor.dims());
  Dims dims;
  for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
    const int64_t source = dim == first ? second : dim == second ? first : dim;
    dims.add(tensor.size(source), tensor.stride(source));
  }
  return dims.of(tensor);
}

Tensor unsqueeze(Stack stack) {
  constexpr const char* kOp = "unsqueeze";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims - 1);
  const int64_t place = dim_of(kOp, "dim", stack.integer(), tensor.dims() + 1);
  Dims dims;
  for (int64_t dim = 0; dim <= tensor.dims(); ++dim) {
    if (dim == place) dims.add(1, 1);
    if (dim < tensor.dims()) dims.add(tensor.size(dim), tensor.stride(dim));
  }
  return dims.of(tensor);
}

Dims without(const Tensor& tensor, int64_t left_out) {
  Dims dims;
  for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
    if (dim != left_out) dims.add(tensor.size(dim), tensor.stride(dim));
  }
  return dims;
}

Tensor squeeze(Stack stack) {
  constexpr const char* kOp = "squeeze";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t squeezed = dim_of(kOp, "dim", stack.integer(), tensor.dims());
  if (tensor.size(squeezed) != 1) return reference(tensor);
  return without(tensor, squeezed).of(tensor);
}

// As torch's expand: dimensions of one element have as many as are asked for, and there may be more before them.
Tensor expand(Stack stack) {
  constexpr const char* kOp = "expand";
  const Tensor tensor = stack.tensor();
  const Integers given = stack.integers();
  const int64_t more = given.size() - tensor.dims();
  bool fits = more >= 0 && given.size() <= kMostDims;
  Dims dims;
  for (int64_t i = 0; fits && i < given.size(); ++i) {
    const int64_t size = i < more ? 1 : tensor.size(i - more), wanted = given[i] == -1 && i >= more ? size : given[i];
    fits = wanted >= 0 && (size == 1 || size == wanted);
    dims.add(wanted, size == 1 ? 0 : tensor.stride(i - more));
  }
  if (!fits) fail(kOp, "size", "expected sizes that ", tensor.shape_text(), " expands to, got ", given.text());
  return dims.of(tensor);
}

// With so many elements of one dimension, each step-th.
Dims part_of(const Tensor& tensor, int64_t part, int64_t length, int64_t step) {
  Dims dims;
  for (int64_t dim = 0; dim < tensor.dims(); ++dim) {
    dims.add(dim == part ? length : tensor.size(dim), tensor.stride(dim) * (dim == part ? step : 1));
  }
  return dims;
}

Tensor narrow(Stack stack) {
  constexpr const char* kOp = "narrow";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t narrowed = dim_of(kOp, "dim", stack.integer(), tensor.dims());
  const int64_t start = stack.integer(), length = stack.integer();
  if (start < 0 || length < 0 || start > tensor.size(narrowed) - length) {
    fail(kOp, "length", "expected a part of ", tensor.size(narrowed), " elements, got ", length, " from ", start,
         " on");
  }
  return part_of(tensor, narrowed, length, 1).of(tensor, start * tensor.stride(narrowed));
}

// tensor[start:end:step] along a dimension: numbers below zero count from the end, and what lies outside is left out.
Tensor sliced(Stack stack) {
  constexpr const char* kOp = "sliced";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t dim = dim_of(kOp, "dim", stack.integer(), tensor.dims()), size = tensor.size(dim);
  const Integers taken = stack.integers();
  if (taken.size() != 3) fail(kOp, "taken", "expected start, end and step, got ", taken.text());
  const auto place = [&](int64_t given) { return std::clamp<int64_t>(given < 0 ? given + size : given, 0, size); };
  const int64_t start = place(taken[0]), end = std::max(start, place(taken[1])), step = taken[2];
  if (step < 1) fail(kOp, "step", "expected a number above 0, got ", step);
  return part_of(tensor, dim, (end - start) / step + ((end - start) % step != 0), step)
      .of(tensor, start * tensor.stride(dim));
}

// One of the parts that tensor.chunk(chunks, dim) gives.
Tensor chunked(Stack stack) {
  constexpr const char* kOp = "chunked";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t dim = dim_of(kOp, "dim", stack.integer(), tensor.dims()), size = tensor.size(dim);
  const int64_t chunks = stack.integer(), place = stack.integer();
  if (chunks < 1) fail(kOp, "chunks", "expected a number above 0, got ", chunks);
  const int64_t length = size / chunks + (size % chunks != 0), most = length == 0 ? chunks : (size - 1) / length + 1;
  if (place < 0 || place >= most) fail(kOp, "place", "expected one of ", most, " parts, got ", place);
  const int64_t start = place * length;
  return part_of(tensor, dim, std::min(length, size - start), 1).of(tensor, start * tensor.stride(dim));
}

Tensor select(Stack stack) {
  constexpr const char* kOp = "select";
  const Tensor tensor = stack.tensor();
  check_dims(kOp, tensor, kMostDims);
  const int64_t selected = dim_of(kOp, "dim", stack.integer(), tensor.dims());
  const int64_t given = stack.integer(), size = tensor.size(selected);
  const int64_t index = given < 0 ? given + size : given;
  if (index < 0 || index >= size) fail(kOp, "index", "expected one of ", size, " elements, got ", given);
  return without(tensor, selected).of(tensor, index * tensor.stride(selected));
}

const ChainableView chainable_permute("permute", &permute), chainable_transpose("transpose", &transpose),
    chainable_unsqueeze("unsqueeze", &unsqueeze), chainable_squeeze("squeeze", &squeeze),
    chainable_narrow("narrow", &narrow), chainable_sliced("sliced", &sliced), chainable_chunked("chunked", &chunked),
    chainable_select("select", &select), chainable_expand("expand", &expand);

}  // namespace
}  // namespace xopt::ops
