// See gemm_arguments.h.
#include "ops/gemm_arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/each_activation.h"
#include "ops/tuned.h"
#include "ops/xpu_weights.h"
#include "runtime/registry.h"

namespace xopt::ops {
namespace {

constexpr int64_t kMaxDims = 64;
constexpr uintptr_t kPackedAlignment = 64;

constexpr NamedValue<Activation> kActivations[] = {
#define XOPT_NAMED_ACTIVATION(NAME) {#NAME, Activation::NAME},
    XOPT_EACH_ACTIVATION(XOPT_NAMED_ACTIVATION)
#undef XOPT_NAMED_ACTIVATION
};
constexpr NamedValue<Binary> kBinaries[] = {{"none", Binary::none}, {"add", Binary::add}, {"mul", Binary::mul}};

Kernel<GemmFn> gemm_f32("gemm", "f32");
Kernel<GemmFn> gemm_bf16("gemm", "bf16");
Kernel<GemmFn> gemm_f16("gemm", "f16");
Kernel<GemmFn> gemm_s8s8("gemm", "s8s8");
Kernel<GemmFn> gemm_u8s8("gemm", "u8s8");

// The leading dimensions as rows; false where that takes more than two levels, or where k is not contiguous.
bool collapse_rows(const Tensor& tensor, RowsView* view) {
  const int64_t last = tensor.dims() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) return false;
  return ops::collapse_rows(tensor.sizes(), tensor.strides(), last, view);
}

std::string expected_output_shape(const Tensor& input, int64_t out_features) {
  std::string text = "[";
  for (int64_t dim = 0; dim + 1 < input.dims(); ++dim) text += std::to_string(input.size(dim)) + ", ";
  return text + std::to_string(out_features) + "]";
}

bool is_output_shape(const Tensor& tensor, const Tensor& input, int64_t out_features) {
  if (tensor.dims() != input.dims() || tensor.size(tensor.dims() - 1) != out_features) return false;
  for (int64_t dim = 0; dim + 1 < input.dims(); ++dim) {
    if (tensor.size(dim) != input.size(dim)) return false;
  }
  return true;
}

}  // namespace

bool collapse_rows(const int64_t* sizes, const int64_t* strides, int64_t dims, RowsView* view) {
  int64_t count[2] = {1, 1}, stride[2] = {0, 0};  // inner and outer level
  int level = 0;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    if (count[level] > 1 && strides[dim] != count[level] * stride[level]) {
      if (++level > 1) return false;
    }
    if (count[level] == 1) stride[level] = strides[dim];
    count[level] *= sizes[dim];
  }
  view->inner_rows = count[0];
  view->row_stride = stride[0];
  view->outer_stride = level == 1 ? stride[1] : 0;
  return true;
}

void check_packed_bytes(const Checked& checked) {
  const Tensor& packed = checked.tensor;
  checked.in_place();
  checked.dtype({DType::u8});
  if (packed.dims() != 1 || (packed.size(0) > 1 && packed.stride(0) != 1)) {
    checked.fail("expected a contiguous tensor of one dimension, as made by linear_pack, got shape ",
                 packed.shape_text());
  }
}

void check_packed_alignment(const Checked& checked) {
  const uintptr_t rest = reinterpret_cast<uintptr_t>(checked.tensor.data()) % kPackedAlignment;
  if (rest != 0) {
    checked.fail("expected data at a multiple of ", kPackedAlignment, " bytes, got data ", rest,
                 " bytes behind one; pass its clone()");
  }
}

PackedHeader packed_header(const char* op, const Tensor& packed) {
  const Checked checked{op, "packed", packed};
  check_packed_bytes(checked);
  const PackedHeader header = header_of<PackedHeader>(packed);
  if (const char* error = packed_header_error(&header, packed.size(0))) {
    checked.fail("expected a packed weight, as made by linear_pack, but ", error, " (", packed.size(0), " bytes)");
  }
  check_packed_alignment(checked);
  return header;
}

PackedHeader first_packed_header(const char* op, const Tensor& packed) {
  const Checked checked{op, "packed", packed};
  check_packed_bytes(checked);
  if (packed.size(0) < static_cast<int64_t>(sizeof(PackedHeader))) {
    checked.fail("expected a packed weight, got ", packed.size(0), " bytes, which is less than a header");
  }
  check_packed_alignment(checked);
  return header_of<PackedHeader>(packed);
}

namespace {

PackedHeader checked_header(const char* op, const Tensor& packed, WeightKind kind, bool gated, int64_t in_features) {
  const PackedHeader header = packed_header(op, packed);
  const Checked checked{op, "packed", packed};
  const std::string_view wanted = kind == WeightKind::int8 ? "int8" : "float32, bfloat16 or float16";
  if ((header.dtype == DType::s8) != (kind == WeightKind::int8)) {
    checked.fail("expected a packed weight of ", wanted, ", got one of ",
                 torch_dtype_name(dtype_to_torch(header.dtype)));
  }
  if ((header.gated != 0) != gated) {
    checked.fail("expected ", gated ? "a gated pair of weights (linear_pack_gated)" : "a single weight", ", got ",
                 gated ? "a single one" : "a gated pair");
  }
  if (header.k != in_features) {
    fail(op, "input", "expected a last dimension of ", header.k, ", the packed weight's in_features, got ",
         in_features);
  }
  return header;
}

}  // namespace

PackedWeight packed_weight(const char* op, const Tensor& packed, WeightKind kind, bool gated, int64_t out_features,
                           int64_t in_features) {
  const PackedHeader header = checked_header(op, packed, kind, gated, in_features);
  if (header.n != out_features) {
    fail(op, "out_features", "expected ", header.n, ", the packed weight's, got ", out_features);
  }
  return PackedWeight(header, packed.data());
}

PackedWeight packed_columns(const char* op, const Tensor& packed, WeightKind kind, int64_t first, int64_t count,
                            int64_t in_features) {
  const PackedHeader header = checked_header(op, packed, kind, false, in_features);
  if (first < 0 || first % kPanelColumns != 0 || first > header.n) {
    fail(op, "first_column", "expected a multiple of ", kPanelColumns, " from 0 to ", header.n,
         ", the packed weight's features, got ", first);
  }
  const int64_t rest = header.n - first;
  if (count < 0 || count > rest || (count != rest && count % kPanelColumns != 0)) {
    fail(op, "out_features", "expected ", rest, ", the packed weight's from column ", first,
         " on, or fewer in a multiple of ", kPanelColumns, ", got ", count);
  }
  return PackedWeight(header, packed.data()).columns(first, count);
}

int64_t input_features(const char* op, const Tensor& input) {
  const Checked checked{op, "input", input};
  checked.in_place();
  if (input.dims() < 1 || input.dims() > kMaxDims) {
    checked.fail("expected 1 to ", kMaxDims, " dimensions, got ", input.dims());
  }
  return input.size(input.dims() - 1);
}

int64_t input_rows(const Tensor& input) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < input.dims(); ++dim) rows *= input.size(dim);
  return rows;
}

RowsView rows_view(const char* op, const char* name, Tensor* input, std::initializer_list<DType> dtypes) {
  RowsView view;
  view.dtype = Checked{op, name, *input}.dtype(dtypes);
  if (input->numel() == 0) return view;
  if (!collapse_rows(*input, &view)) {
    *input = input->contiguous_copy();
    collapse_rows(*input, &view);
  }
  view.data = input->data();
  return view;
}

Tensor empty_output(const char* op, const Tensor& input, int64_t out_features, DType dtype) {
  int64_t sizes[kMaxDims];
  int64_t bytes = dtype_size(dtype);
  bool overflow = false;
  for (int64_t dim = 0; dim < input.dims(); ++dim) {
    sizes[dim] = dim + 1 < input.dims() ? input.size(dim) : out_features;
    overflow |= __builtin_mul_overflow(bytes, sizes[dim] > 1 ? sizes[dim] : 1, &bytes);
  }
  if (overflow) {
    fail(op, "input", "the output's shape ", expected_output_shape(input, out_features),
         " is more than fits in memory");
  }
  return Tensor::empty(sizes, input.dims(), dtype);
}

ColumnVector column_vector(const char* op, const char* name, Tensor* tensor, int64_t out_features) {
  if (!*tensor) return {};
  const Checked checked{op, name, *tensor};
  checked.in_place();
  const DType dtype = checked.dtype(kFloating);
  checked.shape({out_features});
  if (out_features > 1 && tensor->stride(0) != 1) *tensor = tensor->contiguous_copy();
  return {tensor->data(), dtype};
}

float checked_eps(const char* op, double eps) {
  if (!(eps >= 0)) fail(op, "eps", "expected a number of at least 0, got ", eps);
  return static_cast<float>(eps);
}

void set_other(const char* op, const char* name, Tensor* other, const Tensor& input, int64_t out_features,
               bool row_allowed, Epilogue* epilogue) {
  if (!*other) return;
  const Checked checked{op, name, *other};
  checked.in_place();
  epilogue->other_dtype = checked.dtype(kFloating);
  const bool is_row = row_allowed && other->dims() == 1 && other->size(0) == out_features;
  if (!is_row && !is_output_shape(*other, input, out_features)) {
    checked.fail("expected the output's shape ", expected_output_shape(input, out_features),
                 row_allowed ? " or a row [" + std::to_string(out_features) + "]" : "", ", got ", other->shape_text());
  }
  if (other->numel() == 0) return;
  RowsView view;
  const int64_t rows = is_row ? 1 : input_rows(input);
  if (!collapse_rows(*other, &view) || view.inner_rows != rows) {
    *other = other->contiguous_copy();
    collapse_rows(*other, &view);
  }
  epilogue->other = other->data();
  epilogue->other_row_stride = view.row_stride;
}

ActivationArguments::ActivationArguments(Stack& stack)
    : activation(stack.string()), alpha(stack.number()), beta(stack.number()) {}

void ActivationArguments::set(const char* op, Epilogue* epilogue) const {
  epilogue->activation = parse_name(op, "activation", activation.text(), kActivations);
  epilogue->alpha = static_cast<float>(alpha);
  epilogue->beta = static_cast<float>(beta);
}

FusedArguments::FusedArguments(Stack& stack)
    : activation(stack), binary(stack.string()), other(stack.optional_tensor()), activation_last(stack.boolean()) {}

void FusedArguments::set(const char* op, Epilogue* epilogue) const {
  activation.set(op, epilogue);
  epilogue->binary = parse_name(op, "binary", binary.text(), kBinaries);
  if (epilogue->binary != Binary::none && !other) {
    fail(op, "other", "expected a tensor for binary='", binary.text(), "', got None");
  }
  if (epilogue->binary == Binary::none && other) fail(op, "other", "expected None for binary='none', got a tensor");
  epilogue->activation_last = activation_last;
}

DType output_dtype(const char* op, const std::optional<int32_t>& asked, const Tensor& input,
                   std::initializer_list<DType> allowed) {
  return parse_dtype(op, asked ? "out_dtype" : "input", asked.value_or(input.dtype_code()), allowed);
}

void set_output_type(const char* op, DType dtype, double scale, int64_t zero_point, Epilogue* epilogue) {
  epilogue->out_dtype = dtype;
  if (dtype != DType::s8 && dtype != DType::u8) {
    if (scale != 1.0) fail(op, "output_scale", "expected 1, since out_dtype is no int8 type, got ", scale);
    if (zero_point != 0) fail(op, "output_zero_point", "expected 0, since out_dtype is no int8 type, got ", zero_point);
    return;
  }
  const int64_t lowest = dtype == DType::s8 ? -128 : 0, highest = lowest + 255;
  const auto stored_scale = static_cast<float>(scale);
  if (!(stored_scale >= std::numeric_limits<float>::min()) || !std::isfinite(stored_scale)) {
    fail(op, "output_scale", "expected a positive, finite fp32 number, got ", scale);
  }
  if (zero_point < lowest || zero_point > highest) {
    fail(op, "output_zero_point", "expected ", lowest, " to ", highest, ", got ", zero_point);
  }
  epilogue->out_scale = stored_scale;
  epilogue->out_zero_point = static_cast<int32_t>(zero_point);
}

namespace {

// A tensor but for its last elements along the last dimension.
Tensor without_last(const Tensor& tensor, int64_t count) {
  int64_t sizes[kMaxDims];
  std::copy_n(tensor.sizes(), tensor.dims(), sizes);
  sizes[tensor.dims() - 1] -= count;
  return tensor.view(sizes, tensor.strides(), tensor.dims(), 0);
}

}  // namespace

Tensor run_into_rows(const char* op, const Tensor& input, GemmCall* call, bool may_space_rows) {
  // So far apart, rows meet in few sets of L1 where the next product reads them. With a line between them that is up to
  // 1.2 times as fast (256 x 1280 x 5120 in bf16, AMX).
  constexpr int64_t kLine = 64;
  const int64_t n = call->weight.n, size = dtype_size(call->epilogue.out_dtype);
  const int64_t between = may_space_rows && n > 0 && n * size % kMeetingBytes == 0 ? kLine / size : 0;
  Tensor out = empty_output(op, input, n + between, call->epilogue.out_dtype);
  if (between > 0) out = without_last(out, between);
  call->epilogue.out = out.mutable_data();
  call->epilogue.out_row_stride = n + between;
  run_gemm(*call);
  return out;
}

NotedCall* note_gemm(const GemmCall& call, const Tensor& input, const Tensor& packed, const Tensor& bias) {
  NotedCall* noted = note_call(&run_gemm, call);
  if (noted == nullptr) return nullptr;
  noted->reads(call.a.data, input);
  noted->reads(call.weight, packed);
  noted->reads(call.epilogue.bias.data, bias);
  noted->writes(call.epilogue.out, 0);
  return noted;
}

void run_gemm(const GemmCall& call) {
  if (call.m == 0 || call.weight.n == 0) return;
  switch (call.weight.dtype) {
    case DType::f32:
      return run_tuned(gemm_f32, call);
    case DType::bf16:
      return run_tuned(gemm_bf16, call);
    case DType::f16:
      return run_tuned(gemm_f16, call);
    default:
      return run_tuned(call.a.dtype == DType::u8 ? gemm_u8s8 : gemm_s8s8, call);
  }
}

}  // namespace xopt::ops
