// xopt::matmul: alpha * left right + other, over any leading dimensions.
#include "kernels/matmul.h"

#include <algorithm>
#include <cmath>

#include "ops/gemm_arguments.h"
#include "ops/noted_call.h"
#include "ops/prepared.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "matmul";
constexpr int64_t kMostDims = 16;

struct MatmulArguments {
  explicit MatmulArguments(Stack stack)
      : left(stack.tensor()),
        right(stack.tensor()),
        other(stack.optional_tensor()),
        alpha(stack.number()),
        out_dtype(stack.optional_dtype_code()) {}

  Tensor left, right, other;
  double alpha;
  std::optional<int32_t> out_dtype;
};

void check_dims(const Checked& argument, int64_t least) {
  const int64_t dims = argument.tensor.dims();
  if (dims >= least && dims <= kMostDims) return;
  argument.fail("expected ", least, " to ", kMostDims, " dimensions, got ", dims);
}

// The output's shape: leading dimensions by torch's rules of broadcasting, then m and n.
struct OutputShape {
  OutputShape(const Tensor& left, const Tensor& right) : dims(std::max(left.dims(), right.dims())) {
    for (int64_t dim = 0; dim + 2 < dims; ++dim) {
      const int64_t mine = leading_size(left, dim), theirs = leading_size(right, dim);
      if (mine != theirs && mine != 1 && theirs != 1) {
        fail(kOp, "right", "expected leading dimensions that broadcast with left's, which has shape ",
             left.shape_text(), ", got ", right.shape_text());
      }
      sizes[dim] = mine == 1 ? theirs : mine;
    }
    sizes[dims - 2] = left.size(left.dims() - 2);
    sizes[dims - 1] = right.size(right.dims() - 1);
  }
  std::string text() const { return list_text(sizes, dims); }

  int64_t dims;
  int64_t sizes[kMostDims];

 private:
  int64_t leading_size(const Tensor& tensor, int64_t dim) const {
    const int64_t place = dim - (dims - tensor.dims());
    return place < 0 ? 1 : tensor.size(place);
  }
};

// A tensor's strides along the output's dimensions, 0 where it is broadcast.
void set_strides(const Tensor& tensor, const OutputShape& shape, int64_t* strides) {
  const int64_t missing = shape.dims - tensor.dims();
  for (int64_t dim = 0; dim < shape.dims; ++dim) {
    const bool broadcast = dim < missing || (tensor.size(dim - missing) == 1 && shape.sizes[dim] != 1);
    strides[dim] = broadcast ? 0 : tensor.stride(dim - missing);
  }
}

// Replaces a tensor by a copy where neither rows nor columns of its matrices are contiguous.
void make_readable(Tensor* tensor) {
  const int64_t rows = tensor->dims() - 2, columns = rows + 1;
  const bool by_rows = tensor->size(columns) <= 1 || tensor->stride(columns) == 1;
  const bool by_columns = tensor->size(rows) <= 1 || tensor->stride(rows) == 1;
  if (!by_rows && !by_columns) *tensor = tensor->contiguous_copy();
}

MatrixBatch factor(const Tensor& tensor) {
  return {tensor.data(), nullptr, tensor.stride(tensor.dims() - 2), tensor.stride(tensor.dims() - 1)};
}

DType check_other(const Checked& argument, const OutputShape& shape) {
  argument.cpu();
  const DType dtype = argument.dtype(kFloating);
  const int64_t missing = shape.dims - argument.tensor.dims();
  bool fits = missing >= 0;
  for (int64_t dim = 0; fits && dim < argument.tensor.dims(); ++dim) {
    fits = argument.tensor.size(dim) == shape.sizes[dim + missing] || argument.tensor.size(dim) == 1;
  }
  if (!fits) {
    argument.fail("expected a shape that broadcasts to ", shape.text(), ", got ", argument.tensor.shape_text());
  }
  return dtype;
}

// As the kernel takes it: with contiguous rows as long as the output's.
void make_addable(Tensor* other, const OutputShape& shape) {
  const int64_t n = shape.sizes[shape.dims - 1], last = other->dims() - 1;
  if (last >= 0 && other->size(last) == n && (n <= 1 || other->stride(last) == 1)) return;
  int64_t sizes[kMostDims] = {n};
  for (int64_t dim = 0; dim < last; ++dim) sizes[dim] = other->size(dim);
  if (last >= 0) sizes[last] = n;
  *other = other->contiguous_copy(sizes, std::max<int64_t>(1, other->dims()));
}

// A call, and what it points to but for tensors.
struct ReadyMatmul {
  MatmulCall call;
  DType dtype;
  int64_t sizes[kMostDims], lefts[kMostDims], rights[kMostDims], others[kMostDims];
};

void run(const ReadyMatmul& ready) {
  static Kernel<MatmulFn> f32("matmul", "f32"), bf16("matmul", "bf16"), f16("matmul", "f16");
  MatmulCall call = ready.call;
  call.sizes = ready.sizes;
  call.left.batch_strides = ready.lefts;
  call.right.batch_strides = ready.rights;
  call.other.batch_strides = ready.others;
  (ready.dtype == DType::f32 ? f32 : ready.dtype == DType::bf16 ? bf16 : f16)(call);
}

Tensor matmul(Stack stack) {
  MatmulArguments arguments{stack};
  Tensor &left = arguments.left, &right = arguments.right, &other = arguments.other;
  const Checked checked[] = {{kOp, "left", left}, {kOp, "right", right}, {kOp, "other", other}};
  check_no_gradient({checked[0], checked[1], checked[2]});
  checked[0].cpu();
  checked[1].cpu();
  ReadyMatmul ready{};
  ready.dtype = checked[0].dtype(kFloating);
  checked[1].dtype({ready.dtype});
  check_dims(checked[0], 2);
  check_dims(checked[1], 2);
  if (left.size(left.dims() - 1) != right.size(right.dims() - 2)) {
    checked[1].fail("expected as many rows as left has columns, which has shape ", left.shape_text(), ", got ",
                    right.shape_text());
  }
  if (!std::isfinite(arguments.alpha)) fail(kOp, "alpha", "expected a finite number, got ", arguments.alpha);

  const OutputShape shape(left, right);
  std::copy_n(shape.sizes, shape.dims, ready.sizes);
  MatmulCall& call = ready.call;
  call.dims = shape.dims - 2;
  call.m = shape.sizes[shape.dims - 2];
  call.n = shape.sizes[shape.dims - 1];
  call.k = left.size(left.dims() - 1);
  call.alpha = static_cast<float>(arguments.alpha);
  call.out_dtype = output_dtype(kOp, arguments.out_dtype, left, kFloating);
  make_readable(&left);
  make_readable(&right);
  set_strides(left, shape, ready.lefts);
  set_strides(right, shape, ready.rights);
  call.left = factor(left);
  call.right = factor(right);
  if (other) {
    call.other_dtype = check_other(checked[2], shape);
    make_addable(&other, shape);
    set_strides(other, shape, ready.others);
    call.other = {other.data(), nullptr, ready.others[shape.dims - 2], 1};
  }
  Tensor out = Tensor::empty(shape.sizes, shape.dims, call.out_dtype);
  if (out.numel() == 0) return out;
  call.out = out.mutable_data();
  run(ready);
  if (NotedCall* noted = note_call(&run, ready)) {
    noted->reads(call.left.data, left);
    noted->reads(call.right.data, right);
    noted->reads(call.other.data, other);
    noted->writes(call.out, 0);
  }
  return out;
}

const ChainableOp chainable(kOp, &matmul);

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "matmul(Tensor left, Tensor right, Tensor? other=None, *, float alpha=1.0, ScalarType? out_dtype=None) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("matmul", &boxed<matmul>); }

}  // namespace xopt::ops
