// See conv_matrix.h.
#include "ops/conv_matrix.h"

#include <cstring>

#include "runtime/parallel.h"

namespace xopt::ops {
namespace {

// The row of the matrix that an output channel is.
int64_t matrix_row(const ConvLayout& layout, int64_t out) {
  if (layout.depthwise) return out;
  const int64_t product = layout.group_out() == 0 ? 0 : out / layout.product_columns();
  return product * layout.padded_columns() + out - product * layout.product_columns();
}

// Input channels of the product that a row of the matrix belongs to, at each position.
int64_t row_channels(const ConvLayout& layout, int64_t row) {
  if (layout.depthwise) return 1;
  const bool is_rest = row >= layout.products() * layout.padded_columns();
  return (is_rest ? layout.rest() : layout.merged) * layout.group_in;
}

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
      const int64_t row = matrix_row(layout, out);
      const int64_t channels = row_channels(layout, row);
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

// One value for each row of the matrix; zeros between products.
template <class Value>
std::vector<Value> of_rows(const ConvLayout& layout, const std::vector<Value>& of_channels) {
  std::vector<Value> rows(static_cast<size_t>(of_channels.empty() ? 0 : layout.rows()));
  for (int64_t out = 0; out < static_cast<int64_t>(of_channels.size()); ++out) {
    rows[static_cast<size_t>(matrix_row(layout, out))] = of_channels[static_cast<size_t>(out)];
  }
  return rows;
}

template <class Value>
std::vector<Value> of_channels(const ConvLayout& layout, const std::vector<Value>& of_rows) {
  std::vector<Value> channels(static_cast<size_t>(layout.out));
  for (int64_t out = 0; out < layout.out; ++out) {
    channels[static_cast<size_t>(out)] = of_rows[static_cast<size_t>(matrix_row(layout, out))];
  }
  return channels;
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

PackedHeader conv_header(const char* op, const ConvLayout& layout, DType dtype, bool has_zero_point) {
  PackedHeader header;
  if (!packed_header_init(&header, dtype, layout.rows(), layout.columns(), false, has_zero_point)) {
    fail(op, "weight", "packed, it is more than fits in memory");
  }
  return header;
}

void pack_conv_matrix(const char* op, const ConvLayout& layout, const ConvWeightView& weight,
                      const PackedHeader& header, void* packed, const ConvChannels& channels) {
  std::vector<uint8_t> matrix = empty_matrix(op, layout, weight.dtype);
  const std::vector<float> scale = of_rows(layout, channels.scale);
  const std::vector<int32_t> zero_point = of_rows(layout, channels.zero_point);
  for (size_t row = 0; row < zero_point.size(); ++row) {
    const int64_t channels = row_channels(layout, static_cast<int64_t>(row));
    std::memset(matrix.data() + row * static_cast<size_t>(layout.columns()), zero_point[row],
                static_cast<size_t>(layout.positions() * channels));
  }
  switch (dtype_size(weight.dtype)) {
    case 1:
      to_matrix<uint8_t>(layout, weight, &matrix);
      break;
    case 2:
      to_matrix<uint16_t>(layout, weight, &matrix);
      break;
    default:
      to_matrix<uint32_t>(layout, weight, &matrix);
  }
  PackCall call{};
  call.header = header;
  call.weight = {matrix.data(), weight.dtype, layout.columns(), 1};
  call.scale = scale.data();
  call.zero_point = zero_point.empty() ? nullptr : zero_point.data();
  call.packed = packed;
  pack_weight(call);
}

void unpack_conv_matrix(const char* op, const ConvLayout& layout, const void* packed, const ConvWeightView& weight,
                        ConvChannels* channels) {
  std::vector<uint8_t> matrix = empty_matrix(op, layout, weight.dtype);
  UnpackCall call{packed, matrix.data(), nullptr, nullptr, nullptr};
  ConvChannels rows;
  if (channels != nullptr) {
    rows.scale.resize(static_cast<size_t>(layout.rows()));
    rows.zero_point.resize(static_cast<size_t>(layout.rows()));
    call.scale = rows.scale.data();
    call.zero_point = rows.zero_point.data();
  }
  unpack_weight(call);
  if (channels != nullptr) *channels = {of_channels(layout, rows.scale), of_channels(layout, rows.zero_point)};
  switch (dtype_size(weight.dtype)) {
    case 1:
      return from_matrix<uint8_t>(layout, matrix, weight);
    case 2:
      return from_matrix<uint16_t>(layout, matrix, weight);
    default:
      return from_matrix<uint32_t>(layout, matrix, weight);
  }
}

}  // namespace xopt::ops
