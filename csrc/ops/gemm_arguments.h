// From the tensors of an op to a GemmCall: what the linear family and qlinear have in common. Each function checks one
// argument. A tensor whose layout a kernel cannot read in place is replaced by a contiguous copy.
#pragma once

#include "kernels/gemm.h"
#include "ops/check.h"
#include "ops/noted_call.h"

namespace xopt::ops {

// Whether it can be a packed weight at all: one run of bytes; and that it lies where kernels can load it.
void check_packed_bytes(const Checked& checked);
void check_packed_alignment(const Checked& checked);

enum class WeightKind { floating, int8 };

// The packed weight, after its header was checked against what the caller says about it.
PackedWeight packed_weight(const char* op, const Tensor& packed, WeightKind kind, bool gated, int64_t out_features,
                           int64_t in_features);
// Columns `first` to `first + count` of it: one of several weights that were packed as one. They begin and end panels.
PackedWeight packed_columns(const char* op, const Tensor& packed, WeightKind kind, int64_t first, int64_t count,
                            int64_t in_features);
// The header alone, checked; for ops that unpack.
PackedHeader packed_header(const char* op, const Tensor& packed);
// The first header of a packed weight that consists of several, not checked itself yet.
PackedHeader first_packed_header(const char* op, const Tensor& packed);

// The last dimension of `input`; an error where there is none.
int64_t input_features(const char* op, const Tensor& input);
// The product of all dimensions but the last.
int64_t input_rows(const Tensor& input);
// Merges dimensions into two levels of rows; false where that takes more.
bool collapse_rows(const int64_t* sizes, const int64_t* strides, int64_t dims, RowsView* view);
RowsView rows_view(const char* op, const char* name, Tensor* input, std::initializer_list<DType> dtypes);

// Of the input's shape with its last dimension replaced.
Tensor empty_output(const char* op, const Tensor& input, int64_t out_features, DType dtype);

// bias and the like: [out_features] of any floating dtype, or absent.
ColumnVector column_vector(const char* op, const char* name, Tensor* tensor, int64_t out_features);

// What a norm adds to a variance.
float checked_eps(const char* op, double eps);

// `other` and its row stride. It has the shape of the output, or is a row [out_features] if that is allowed.
void set_other(const char* op, const char* name, Tensor* other, const Tensor& input, int64_t out_features,
               bool row_allowed, Epilogue* epilogue);

// What the ops that fuse have in common, in the order of their schemas.
struct ActivationArguments {
  explicit ActivationArguments(Stack& stack);
  void set(const char* op, Epilogue* epilogue) const;

  String activation;
  double alpha, beta;
};
struct FusedArguments {
  explicit FusedArguments(Stack& stack);
  void set(const char* op, Epilogue* epilogue) const;  // but for the data of `other`, whose shape is the op's matter

  ActivationArguments activation;
  String binary;
  Tensor other;
  bool activation_last;
};

// The dtype asked for, or else the input's.
DType output_dtype(const char* op, const std::optional<int32_t>& asked, const Tensor& input,
                   std::initializer_list<DType> allowed);
// out_dtype, output_scale and output_zero_point.
void set_output_type(const char* op, DType dtype, double scale, int64_t zero_point, Epilogue* epilogue);

// Picks the kernel by the dtypes and runs it, unless there is nothing to compute.
void run_gemm(const GemmCall& call);
// Runs it into a new output of `input`'s leading dimensions.
Tensor run_into_rows(const char* op, const Tensor& input, GemmCall* call, bool may_space_rows = false);
// What has been run so: the rest of the epilogue is for the operator to say. nullptr: nobody wants to know.
NotedCall* note_gemm(const GemmCall& call, const Tensor& input, const Tensor& packed, const Tensor& bias);

}  // namespace xopt::ops
