// See conv_matrix.h.
#include "ops/conv_matrix.h"

#include <vector>

#include "runtime/parallel.h"

namespace xopt::ops {
namespace {

// Calls body(place in the matrix, place in the weight) for each run of the matrix that holds a group's input channels of
// one position for one output channel.
template <class Body>
void for_each_run(const ConvLayout& layout, const ConvWeightView& weight, const Body& body) {
  const auto position_offset = [&](int64_t position) {
    int64_t offset = 0;
    for (int i = 2; i >= 0; --i) {
      offset += position % layout.kernel[i] * weight.kernel[i];
      position /= layout.kernel[i];
    }
    return offset;
  };
  parallel(max_threads(), [&](int thread, int count) {
    for (int64_t out = layout.out * thread / count; out < layout.out * (thread + 1) / count; ++out) {
      const int64_t group = layout.group_out() == 0 ? 0 : out / layout.group_out();
      const int64_t product = layout.depthwise ? 0 : group / layout.merged;
      const int64_t row =
          layout.depthwise ? out : product * layout.padded_columns() + out - product * layout.product_columns();
      const int64_t channels = layout.depthwise ? 1 : layout.product_channels();
      const int64_t within = layout.depthwise ? 0 : group % layout.merged * layout.group_in;
      const int64_t source = group * weight.group + (out - group * layout.group_out()) * weight.out;
      for (int64_t position = 0; position < layout.positions(); ++position) {
        body(row * layout.columns() + position * channels + within, source + position_offset(position));
      }
    }
  });
}

template <class Bits>
void to_matrix(const ConvLayout& layout, const ConvWeightView& weight, std::vector<uint8_t>* bytes) {
  auto* matrix = reinterpret_cast<Bits*>(bytes->data());
  const auto* values = static_cast<const Bits*>(weight.data);
  for_each_run(layout, weight, [&](int64_t to, int64_t from) {
    for (int64_t i = 0; i < layout.group_in; ++i) matrix[to + i] = values[from + i * weight.in];
  });
}

template <class Bits>
void from_matrix(const ConvLayout& layout, const std::vector<uint8_t>& bytes, const ConvWeightView& weight) {
  const auto* matrix = reinterpret_cast<const Bits*>(bytes.data());
  auto* values = static_cast<Bits*>(const_cast<void*>(weight.data));
  for_each_run(layout, weight, [&](int64_t from, int64_t to) {
    for (int64_t i = 0; i < layout.group_in; ++i) values[to + i * weight.in] = matrix[from + i];
  });
}

// Zeros stand between the groups of a product, and between products whose columns do not fill their panels.
std::vector<uint8_t> empty_matrix(const char* op, const ConvLayout& layout, DType dtype) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(layout.rows(), layout.columns() * dtype_size(dtype), &bytes)) {
    fail(op, "weight", "packed, it is more than fits in memory");
  }
  return std::vector<uint8_t>(static_cast<size_t>(bytes > 0 ? bytes : 0));
}

}  // namespace

PackedHeader conv_header(const char* op, const ConvLayout& layout, DType dtype) {
  PackedHeader header;
  if (!packed_header_init(&header, dtype, layout.rows(), layout.columns(), false, false)) {
    fail(op, "weight", "packed, it is more than fits in memory");
  }
  return header;
}

void pack_conv_matrix(const char* op, const ConvLayout& layout, const ConvWeightView& weight,
                      const PackedHeader& header, void* packed) {
  std::vector<uint8_t> matrix = empty_matrix(op, layout, weight.dtype);
  if (dtype_size(weight.dtype) == 4) {
    to_matrix<uint32_t>(layout, weight, &matrix);
  } else {
    to_matrix<uint16_t>(layout, weight, &matrix);
  }
  PackCall call{};
  call.header = header;
  call.weight = {matrix.data(), weight.dtype, layout.columns(), 1};
  call.packed = packed;
  pack_weight(call);
}

void unpack_conv_matrix(const char* op, const ConvLayout& layout, const void* packed, const ConvWeightView& weight) {
  std::vector<uint8_t> matrix = empty_matrix(op, layout, weight.dtype);
  unpack_weight({packed, matrix.data(), nullptr, nullptr, nullptr});
  if (dtype_size(weight.dtype) == 4) {
    from_matrix<uint32_t>(layout, matrix, weight);
  } else {
    from_matrix<uint16_t>(layout, matrix, weight);
  }
}

}  // namespace xopt::ops
