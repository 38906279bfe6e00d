// The few types that all native code shares. No torch, no STL containers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xopt {

enum class DType : uint8_t { f32, bf16, f16, s8, u8, s32 };

constexpr int64_t dtype_size(DType dtype) {
  return dtype == DType::f32 || dtype == DType::s32 ? 4 : (dtype == DType::bf16 || dtype == DType::f16 ? 2 : 1);
}

enum class Activation : uint8_t {
  none,
  relu,
  gelu_erf,
  gelu_tanh,
  silu,
  sigmoid,
  tanh,
  hardswish,
  hardsigmoid,
  quick_gelu,  // x * sigmoid(1.702 x)
  leaky_relu,  // alpha: the slope below zero
  clamp,       // alpha: lower bound, beta: upper bound
};

enum class Binary : uint8_t { none, add, mul };
enum class Norm : uint8_t { none, layer_norm, rms_norm, unit_norm };

// Rows of A: row r lies at (r / inner_rows) * outer_stride + (r % inner_rows) * row_stride elements; k is contiguous.
// One level of merging lets a [batch, seq, k] slice of a larger tensor be read where it stands.
struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t inner_rows = 1;  // rows before outer_stride is taken
  int64_t row_stride = 0;
  int64_t outer_stride = 0;
};

// [batch, heads, rows, columns] with strides in elements; columns are contiguous.
struct HeadsView {
  const void* data;
  int64_t batch_stride, head_stride, row_stride;
};

// How many channels kernels put side by side themselves, of images that have them elsewhere.
inline constexpr int64_t kMostChannelsApart = 16;

// Rows of A for a convolution: row r is the patch of input under the kernel at output position r, counted over images,
// depth, height and width; k counts the kernel's positions (depth, height, width) and within each the channels, which
// are contiguous. What lies outside the input is zero, which of int8 is `zero`. Fewer spatial dimensions have ones in
// front.
struct PatchesView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t channels = 0;
  int64_t in[3] = {1, 1, 1}, out[3] = {1, 1, 1}, kernel[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};
  int64_t padding[3] = {0, 0, 0};    // before the first element; that after the last follows from `out`
  int64_t image_stride = 0;          // elements
  int64_t in_stride[3] = {0, 0, 0};  // elements
  int64_t channel_stride = 1;        // likewise; another than 1 only of dense products, and kMostChannelsApart
  int32_t zero = 0;                  // int8: the zero point, within the dtype's range
};

}  // namespace xopt
