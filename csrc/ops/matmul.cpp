// xopt::matmul: alpha * left right + other, over any leading dimensions.
#include "kernels/matmul.h"

#include <algorithm>
#include <cmath>

#include "ops/gemm_arguments.h"
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
struct Strides {
  Strides(const Tensor& tensor, const OutputShape& shape) {
    const int64_t missing = shape.dims - tensor.dims();
    for (int64_t dim = 0; dim < shape.dims; ++dim) {
      const bool broadcast = dim < missing || (tensor.size(dim - missing) == 1 && shape.sizes[dim] != 1);
      values[dim] = broadcast ? 0 : tensor.stride(dim - missing);
    }
  }

  int64_t values[kMostDims];
};

// Replaces a tensor by a copy where neither rows nor columns of its matrices are contiguous.
void make_readable(Tensor* tensor) {
  const int64_t rows = tensor->dims() - 2, columns = rows + 1;
  const bool by_rows = tensor->size(columns) <= 1 || tensor->stride(columns) == 1;
  const bool by_columns = tensor->size(rows) <= 1 || tensor->stride(rows) == 1;
  if (!by_rows && !by_columns) *tensor = tensor->contiguous_copy();
}

MatrixBatch factor(const Tensor& tensor, const Strides& strides) {
  return {tensor.data(), strides.values, tensor.stride(tensor.dims() - 2), tensor.stride(tensor.dims() - 1)};
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

void run(const MatmulCall& call, DType dtype) {
  static Kernel<MatmulFn> f32("matmul", "f32"), bf16("matmul", "bf16"), f16("matmul", "f16");
  (dtype == DType::f32 ? f32 : dtype == DType::bf16 ? bf16 : f16)(call);
}

void matmul(StableIValue* stack, uint64_t, uint64_t) {
  MatmulArguments arguments{Stack(stack)};
  Tensor &left = arguments.left, &right = arguments.right, &other = arguments.other;
  const Checked checked[] = {{kOp, "left", left}, {kOp, "right", right}, {kOp, "other", other}};
  check_no_gradient({checked[0], checked[1], checked[2]});
  checked[0].cpu();
  checked[1].cpu();
  const DType dtype = checked[0].dtype(kFloating);
  checked[1].dtype({dtype});
  check_dims(checked[0], 2);
  check_dims(checked[1], 2);
  if (left.size(left.dims() - 1) != right.size(right.dims() - 2)) {
    checked[1].fail("expected as many rows as left has columns, which has shape ", left.shape_text(), ", got ",
                    right.shape_text());
  }
  if (!std::isfinite(arguments.alpha)) fail(kOp, "alpha", "expected a finite number, got ", arguments.alpha);

  const OutputShape shape(left, right);
  MatmulCall call;
  call.dims = shape.dims - 2;
  call.sizes = shape.sizes;
  call.m = shape.sizes[shape.dims - 2];
  call.n = shape.sizes[shape.dims - 1];
  call.k = left.size(left.dims() - 1);
  call.alpha = static_cast<float>(arguments.alpha);
  call.out_dtype = output_dtype(kOp, arguments.out_dtype, left, kFloating);
  make_readable(&left);
  make_readable(&right);
  const Strides lefts(left, shape), rights(right, shape);
  call.left = factor(left, lefts);
  call.right = factor(right, rights);
  std::optional<Strides> others;
  if (other) {
    call.other_dtype = check_other(checked[2], shape);
    make_addable(&other, shape);
    others.emplace(other, shape);
    call.other = {other.data(), others->values, others->values[shape.dims - 2], 1};
  }
  Tensor out = Tensor::empty(shape.sizes, shape.dims, call.out_dtype);
  call.out = out.mutable_data();
  if (out.numel() > 0) run(call, dtype);
  return_tensor(stack, 0, std::move(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def(
      "matmul(Tensor left, Tensor right, Tensor? other=None, *, float alpha=1.0, ScalarType? out_dtype=None) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) { library.impl("matmul", &matmul); }

}  // namespace xopt::ops
