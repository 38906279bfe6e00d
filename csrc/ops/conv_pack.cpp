// xopt::conv_pack and conv_unpack: between the weight of a convolution, [out, in / groups, kernel...], and packed bytes.
#include <cstring>
#include <vector>

#include "ops/conv_layout.h"
#include "ops/gemm_arguments.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

namespace xopt::ops {
namespace {

// Calls body(row, column, output channel, position) for each run of the matrix that holds a group's input channels of
// one position for one output channel, with the place where it begins.
template <class Body>
void for_each_run(const ConvLayout& layout, const Body& body) {
  parallel(max_threads(), [&](int thread, int count) {
    for (int64_t out = layout.out * thread / count; out < layout.out * (thread + 1) / count; ++out) {
      const int64_t group = layout.group_out() == 0 ? 0 : out / layout.group_out();
      const int64_t product = layout.depthwise ? 0 : group / layout.merged;
      const int64_t row =
          layout.depthwise ? out : product * layout.padded_columns() + out - product * layout.product_columns();
      const int64_t channels = layout.depthwise ? 1 : layout.product_channels();
      const int64_t within = layout.depthwise ? 0 : group % layout.merged * layout.group_in;
      for (int64_t position = 0; position < layout.positions(); ++position) {
        body(row, position * channels + within, out, position);
      }
    }
  });
}

// Offset in elements of a kernel position in a weight of these strides.
int64_t position_offset(const ConvLayout& layout, const int64_t* stride, int64_t position) {
  int64_t offset = 0;
  for (int64_t i = 2; i >= 3 - layout.dims; --i) {
    offset += position % layout.kernel[i] * stride[i - (3 - layout.dims)];
    position /= layout.kernel[i];
  }
  return offset;
}

template <class Bits>
void to_matrix(const ConvLayout& layout, const Tensor& weight, Bits* matrix) {
  int64_t stride[5];
  for (int64_t i = 0; i < weight.dims(); ++i) stride[i] = weight.stride(i);
  const auto* from = static_cast<const Bits*>(weight.data());
  for_each_run(layout, [&](int64_t row, int64_t column, int64_t out, int64_t position) {
    const Bits* source = from + out * stride[0] + position_offset(layout, stride + 2, position);
    Bits* target = matrix + row * layout.columns() + column;
    for (int64_t i = 0; i < layout.group_in; ++i) target[i] = source[i * stride[1]];
  });
}

template <class Bits>
void from_matrix(const ConvLayout& layout, const Bits* matrix, Bits* weight) {
  for_each_run(layout, [&](int64_t row, int64_t column, int64_t out, int64_t position) {
    const Bits* source = matrix + row * layout.columns() + column;
    Bits* target = weight + out * layout.group_in * layout.positions() + position;
    for (int64_t i = 0; i < layout.group_in; ++i) target[i * layout.positions()] = source[i];
  });
}

size_t matrix_bytes(const char* op, const ConvLayout& layout, DType dtype) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(layout.rows(), layout.columns() * dtype_size(dtype), &bytes)) {
    fail(op, "weight", "packed, it is more than fits in memory");
  }
  return static_cast<size_t>(bytes > 0 ? bytes : 0);
}

void conv_pack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_pack";
  Stack arguments(stack);
  const Tensor weight(arguments.tensor());
  const int64_t groups = arguments.integer();
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype_code(), kFloating);
  const Checked checked{kOp, "weight", weight};
  checked.cpu();
  const DType source = checked.dtype(kFloating);
  const ConvLayout layout = conv_layout(kOp, "weight", weight.sizes(), weight.dims(), weight.shape_text(), groups);

  // Zeros stand between the groups of a product, and between products whose columns do not fill their panels.
  std::vector<uint8_t> matrix(matrix_bytes(kOp, layout, source));
  if (dtype_size(source) == 4) {
    to_matrix(layout, weight, reinterpret_cast<uint32_t*>(matrix.data()));
  } else {
    to_matrix(layout, weight, reinterpret_cast<uint16_t*>(matrix.data()));
  }
  PackCall call{};
  if (!packed_header_init(&call.header, dtype, layout.rows(), layout.columns(), false, false)) {
    checked.fail("packed, it is more than fits in memory");
  }
  call.weight = {matrix.data(), source, layout.columns(), 1};
  call.packed = weight_alloc(static_cast<size_t>(call.header.bytes));
  Tensor packed = Tensor::adopt_bytes(call.packed, call.header.bytes, [](void* bytes, void*) { weight_free(bytes); });
  pack_weight(call);
  return_tensor(stack, 0, std::move(packed));
}

struct UnpackArguments {
  explicit UnpackArguments(Stack stack)
      : packed(stack.tensor()), weight_size(stack.integers()), groups(stack.integer()), dtype(stack.dtype_code()) {}

  Tensor packed;
  Integers weight_size;
  int64_t groups;
  int32_t dtype;
};

void conv_unpack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr const char* kOp = "conv_unpack";
  const UnpackArguments arguments{Stack(stack)};
  const Integers& sizes = arguments.weight_size;
  int64_t weight_size[Integers::kMost];
  for (int64_t i = 0; i < Integers::kMost; ++i) weight_size[i] = sizes[i];
  const ConvLayout layout = conv_layout(kOp, "weight_size", weight_size, sizes.size(), sizes.text(), arguments.groups);
  const PackedHeader header = packed_header(kOp, arguments.packed);
  const DType dtype = parse_dtype(kOp, "dtype", arguments.dtype, kFloating);
  if (header.dtype != dtype) {
    fail(kOp, "dtype", "expected ", torch_dtype_name(dtype_to_torch(header.dtype)), ", the packed weight's, got ",
         torch_dtype_name(arguments.dtype));
  }
  check_conv_packed(kOp, header, layout);

  std::vector<uint8_t> matrix(matrix_bytes(kOp, layout, dtype));
  unpack_weight({arguments.packed.data(), matrix.data(), nullptr, nullptr, nullptr});
  Tensor weight = Tensor::empty(weight_size, sizes.size(), dtype);
  if (dtype_size(dtype) == 4) {
    from_matrix(layout, reinterpret_cast<const uint32_t*>(matrix.data()),
                static_cast<uint32_t*>(weight.mutable_data()));
  } else {
    from_matrix(layout, reinterpret_cast<const uint16_t*>(matrix.data()),
                static_cast<uint16_t*>(weight.mutable_data()));
  }
  return_tensor(stack, 0, std::move(weight));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(xopt, library) {
  library.def("conv_pack(Tensor weight, int groups=1, *, ScalarType dtype) -> Tensor");
  library.def("conv_unpack(Tensor packed, int[] weight_size, int groups, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(xopt, CPU, library) {
  library.impl("conv_pack", &conv_pack);
  library.impl("conv_unpack", &conv_unpack);
}

}  // namespace xopt::ops
