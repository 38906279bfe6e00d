// See conv_phases.h.
#include "ops/conv_phases.h"

#include <cstring>
#include <numeric>

#include "ops/gemm_arguments.h"
#include "ops/images.h"

namespace xopt::ops {
namespace {

// The phases along one dimension. A tap k adds to the positions of residue k * dilation, so taps of one phase are
// stride / gcd(stride, dilation) apart.
std::vector<Taps> phases_along(int64_t kernel, int64_t stride, int64_t dilation, int64_t step) {
  std::vector<Taps> found;
  for (int64_t first = 0; first < kernel && first < step; ++first) {
    found.push_back({first * dilation % stride, first, (kernel - 1 - first) / step + 1});
  }
  return found;
}

}  // namespace

ConvPhases conv_phases(const char* op, const char* name, const ListView& sizes, int64_t groups, const Integers& stride,
                       const Integers& dilation) {
  const int64_t count = sizes.count;
  if (count < 3 || count > 5) {
    fail(op, name, "expected [in_channels, out_channels / groups, kernel...] with 1 to 3 sizes of the kernel, got ",
         sizes.text());
  }
  if (groups < 1 || sizes[0] % groups != 0) {
    fail(op, "groups", "expected a divisor of the ", sizes[0], " input channels, got ", groups);
  }
  ConvPhases all;
  all.in = sizes[0];
  all.group_out = sizes[1];
  all.groups = groups;
  all.dims = count - 2;
  check_integers(op, "stride", stride, all.dims, 1);
  check_integers(op, "dilation", dilation, all.dims, 1);
  int64_t channels = 0;
  if (__builtin_mul_overflow(sizes[1], groups, &channels)) fail(op, name, "its sizes ", sizes.text(), " are too large");
  int64_t whole[5] = {channels, all.group_in(), 1, 1, 1};
  for (int64_t i = 2; i < count; ++i) whole[i] = sizes[i];
  conv_layout(op, name, {whole, count}, groups, sizes);  // for its checks

  std::vector<Taps> along[3] = {{Taps{}}, {Taps{}}, {Taps{}}};
  for (int64_t i = 0; i < all.dims; ++i) {
    const int64_t at = 3 - all.dims + i, common = std::gcd(stride[i], dilation[i]);
    int64_t extent = 0;
    if (__builtin_mul_overflow(dilation[i], sizes[2 + i] - 1, &extent)) {
      fail(op, "dilation", "expected smaller numbers for a kernel of ", sizes.text(), ", got ", dilation.text());
    }
    all.kernel[at] = sizes[2 + i];
    all.stride[at] = stride[i];
    all.dilation[at] = dilation[i];
    all.tap_step[at] = stride[i] / common;
    all.tap_dilation[at] = dilation[i] / common;
    along[at] = phases_along(sizes[2 + i], stride[i], dilation[i], all.tap_step[at]);
    all.cover_all = all.cover_all && static_cast<int64_t>(along[at].size()) == stride[i];
  }
  for (const Taps& depth : along[0]) {
    for (const Taps& height : along[1]) {
      for (const Taps& width : along[2]) {
        const int64_t taps[3] = {depth.count, height.count, width.count};
        for (int64_t i = 0; i < all.dims; ++i) whole[2 + i] = taps[3 - all.dims + i];
        all.phases.push_back({{depth, height, width}, conv_layout(op, name, {whole, count}, groups, sizes)});
      }
    }
  }
  return all;
}

ConvWeightView phase_weight(const ConvPhases& phases, const ConvPhase& phase, const void* data, DType dtype,
                            const int64_t* strides) {
  ConvWeightView view{data, dtype, phases.group_in() * strides[0], strides[1], strides[0], {0, 0, 0}};
  int64_t last = 0;
  for (int64_t at = 3 - phases.dims; at < 3; ++at) {
    const int64_t stride = strides[2 + at - (3 - phases.dims)], step = phases.tap_step[at];
    view.kernel[at] = -step * stride;
    last += (phase.taps[at].first + (phase.taps[at].count - 1) * step) * stride;
  }
  return view.from(last);
}

std::vector<int64_t> phase_offsets(const char* op, const ConvPhases& phases, DType dtype) {
  std::vector<int64_t> offsets(1, 0);
  for (const ConvPhase& phase : phases.phases) {
    int64_t end = 0;
    if (__builtin_add_overflow(offsets.back(), conv_header(op, phase.layout, dtype).bytes, &end)) {
      fail(op, "weight", "packed, it is more than fits in memory");
    }
    offsets.push_back(end);
  }
  return offsets;
}

DType packed_phases_dtype(const char* op, const Tensor& packed, const ConvPhases& phases) {
  const PackedHeader first = first_packed_header(op, packed);
  const Checked checked{op, "packed", packed};
  if (dtype_size(first.dtype) == 1 || first.dtype > DType::u8 || first.bytes > packed.size(0)) {
    checked.fail("expected a weight as made by conv_transpose_pack, got other bytes");
  }
  const std::vector<int64_t> offsets = phase_offsets(op, phases, first.dtype);
  if (offsets.back() != packed.size(0)) {
    checked.fail("expected ", offsets.back(), " bytes for this weight_size, stride, dilation and these groups, got ",
                 packed.size(0));
  }
  for (size_t i = 0; i < phases.phases.size(); ++i) {
    const uint8_t* data = static_cast<const uint8_t*>(packed.data()) + offsets[i];
    if (const char* error = packed_header_error(data, offsets[i + 1] - offsets[i])) {
      checked.fail("expected a weight as made by conv_transpose_pack, but of its matrix ", i, " ", error);
    }
    PackedHeader header;
    std::memcpy(&header, data, sizeof(header));
    check_conv_packed(op, header, phases.phases[i].layout);
  }
  return first.dtype;
}

}  // namespace xopt::ops
