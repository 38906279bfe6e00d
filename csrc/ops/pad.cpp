// A tensor with a constant around it, or less of it, as a call of a chain: torch has the operator. It is the tensor itself
// where there is nothing to do, as for images that are whole windows already.
#include <algorithm>

#include "ops/check.h"
#include "ops/images.h"
#include "ops/prepared.h"

namespace xopt::ops {
namespace {

constexpr const char* kOp = "padded";
constexpr int64_t kMostDims = Integers::kMost;

struct Around {
  int64_t before = 0, after = 0;
};

Tensor filled(Tensor out, float value) {
  const int64_t one = 1, nothing[kMostDims] = {};
  const Tensor number = Tensor::empty(&one, 1, DType::f32);
  *static_cast<float*>(number.mutable_data()) = value;
  return number.view(out.sizes(), nothing, out.dims(), 0).copied_to(std::move(out));
}

Tensor padded(Stack stack) {
  const Tensor tensor = stack.tensor();
  const Integers amounts = stack.integers();
  const auto value = static_cast<float>(stack.number());
  const DType dtype = Checked{kOp, "input", tensor}.dtype(kFloating);
  const int64_t dims = tensor.dims();
  if (dims > kMostDims) fail(kOp, "input", "expected at most ", kMostDims, " dimensions, got ", tensor.shape_text());
  if (amounts.size() % 2 != 0 || amounts.size() > std::min(2 * dims, Integers::kMost)) {
    fail(kOp, "amounts", "expected two numbers for each of at most ", dims, " dimensions, got ", amounts.text());
  }
  Around around[kMostDims];
  bool changes = false, adds = false;
  for (int64_t i = 0; i < amounts.size(); i += 2) {  // from the last dimension on
    around[dims - 1 - i / 2] = {amounts[i], amounts[i + 1]};
    changes = changes || amounts[i] != 0 || amounts[i + 1] != 0;
    adds = adds || amounts[i] > 0 || amounts[i + 1] > 0;
  }
  if (!changes) return Tensor(tensor.share());

  int64_t sizes[kMostDims], inside[kMostDims], first_inside = 0, first = 0;
  for (int64_t dim = 0; dim < dims; ++dim) {
    const auto& [before, after] = around[dim];
    sizes[dim] = tensor.size(dim) + before + after;
    inside[dim] = tensor.size(dim) + std::min<int64_t>(before, 0) + std::min<int64_t>(after, 0);
    if (sizes[dim] < 0 || inside[dim] < 0) {
      fail(kOp, "amounts", "expected amounts that leave something of ", tensor.shape_text(), ", got ", amounts.text());
    }
  }
  Tensor out = is_dense_channels_last(tensor) ? Tensor::empty_channels_last(sizes, dims, dtype)
                                              : Tensor::empty(sizes, dims, dtype);
  if (adds) out = filled(std::move(out), value);
  for (int64_t dim = 0; dim < dims; ++dim) {
    first_inside += std::max<int64_t>(around[dim].before, 0) * out.stride(dim);
    first += std::max<int64_t>(-around[dim].before, 0) * tensor.stride(dim);
  }
  tensor.view(inside, tensor.strides(), dims, first).copied_to(out.view(inside, out.strides(), dims, first_inside));
  return out;
}

const ChainableView chainable("padded", &padded);

}  // namespace
}  // namespace xopt::ops
