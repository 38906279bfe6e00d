// Packing of weights of 8 and 4 bits, and their header. The layout is described in weight_only.h.
#include "kernels/weight_only.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "runtime/parallel.h"

namespace xopt {
namespace {

constexpr char kMagic[8] = {'x', 'o', 'p', 't', 'c', 'o', 'd', 'e'};
constexpr uint16_t kVersion = 1;

int64_t group_count(int64_t k, int64_t group) { return group == 0 ? 0 : ceil_div(k, group); }

// Row of the source that a packed column comes from; -1: padding.
int64_t source_row(const WeightOnlyHeader& header, int64_t column) {
  const int64_t panel = column / kPanelColumns, place = column % kPanelColumns;
  const bool from_up = header.gated != 0 && place >= kTileColumns;
  const int64_t row = header.gated != 0 ? panel * kTileColumns + place % kTileColumns : column;
  if (row >= header.n) return -1;
  return from_up ? header.n + row : row;
}

// The codes of a panel; false where one is beyond its bits.
bool pack_codes(const WeightOnlyPackCall& call, int64_t panel, uint8_t* to) {
  const WeightOnlyHeader& header = call.header;
  const auto* data = static_cast<const int8_t*>(call.weight.data);
  const int64_t pairs = ceil_div(header.k, kCodedTileK) * kCodedTileK / 2;
  bool fits = true;
  for (int64_t place = 0; place < kPanelColumns; ++place) {
    const int64_t row = source_row(header, panel * kPanelColumns + place);
    const auto code = [&](int64_t k) {
      return row < 0 || k >= header.k ? 0 : data[row * call.weight.row_stride + k * call.weight.column_stride];
    };
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int even = code(2 * pair), odd = code(2 * pair + 1);
      const int64_t tile = pair / kTileRows * 2 + place / kTileColumns;
      const int64_t at = pair % kTileRows * kTileColumns + place % kTileColumns;
      uint8_t* row_of_tile = to + tile * coded_tile_bytes(header.bits);
      if (header.bits == 8) {
        row_of_tile[2 * at] = static_cast<uint8_t>(even);
        row_of_tile[2 * at + 1] = static_cast<uint8_t>(odd);
      } else {
        fits &= even >= -8 && even <= 7 && odd >= -8 && odd <= 7;
        row_of_tile[at] = static_cast<uint8_t>((even & 15) | (odd & 15) << 4);
      }
    }
  }
  return fits;
}

bool pack_scales(const WeightOnlyPackCall& call, const CodedWeight& weight, int64_t panel) {
  const int64_t groups = group_count(weight.k, weight.group);
  auto* scale = const_cast<float*>(weight.scale);
  bool fits = true;
  for (int64_t column = panel * kPanelColumns; column < (panel + 1) * kPanelColumns; ++column) {
    const int64_t row = source_row(call.header, column);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t to = group * weight.columns + column;
      scale[to] = row < 0 ? 0.0F : call.scale[row * groups + group];
      if (weight.zero_point == nullptr) continue;
      const int32_t zero = row < 0 ? 0 : call.zero_point[row * groups + group];
      fits &= zero >= -128 && zero <= 127;
      const_cast<int8_t*>(weight.zero_point)[to] = static_cast<int8_t>(zero);
    }
  }
  return fits;
}

}  // namespace

bool weight_only_header_init(WeightOnlyHeader* header, int bits, int64_t n, int64_t k, int64_t group, bool gated,
                             bool has_zero_point) {
  constexpr int64_t kMost = int64_t{1} << 56;  // so that rounding up cannot overflow
  if (n < 0 || k < 0 || n > kMost || k > kMost || (bits != 8 && bits != 4)) return false;
  if (group != k && (group <= 0 || group > k || group % kCodedTileK != 0)) return false;
  int64_t panel_bytes = 0, scales = 0, bytes = 0;
  if (__builtin_mul_overflow(ceil_div(k, kCodedTileK), 2 * coded_tile_bytes(bits), &panel_bytes)) return false;
  const int64_t scale_bytes = sizeof(float) + (has_zero_point ? sizeof(int8_t) : 0);  // of a column and group
  if (__builtin_mul_overflow(group_count(k, group), kPanelColumns * scale_bytes, &scales)) return false;
  if (__builtin_add_overflow(panel_bytes, scales, &panel_bytes)) return false;
  if (__builtin_mul_overflow(packed_panels(n, gated), panel_bytes, &bytes)) return false;
  if (__builtin_add_overflow(bytes, static_cast<int64_t>(sizeof(WeightOnlyHeader)), &bytes)) return false;

  *header = WeightOnlyHeader{};
  std::memcpy(header->magic, kMagic, sizeof(kMagic));
  header->version = kVersion;
  header->bits = static_cast<uint8_t>(bits);
  header->gated = gated ? 1 : 0;
  header->has_zero_point = has_zero_point ? 1 : 0;
  header->n = n;
  header->k = k;
  header->group = group;
  header->bytes = bytes;
  header->checksum = header_checksum(header);
  return true;
}

const char* weight_only_header_error(const void* data, int64_t bytes) {
  if (bytes < static_cast<int64_t>(sizeof(WeightOnlyHeader))) return "it is shorter than the 64 bytes of a header";
  WeightOnlyHeader header;
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return "it does not begin with 'xoptcode'";
  if (header.checksum != header_checksum(&header)) return "its header is corrupted (wrong checksum)";
  if (header.version != kVersion) return "it has the layout of another version of xopt";
  WeightOnlyHeader expected;
  if (header.gated > 1 || header.has_zero_point > 1 ||
      !weight_only_header_init(&expected, header.bits, header.n, header.k, header.group, header.gated != 0,
                               header.has_zero_point != 0) ||
      expected.bytes != header.bytes) {
    return "its header contradicts itself";
  }
  if (header.bytes != bytes) return header.bytes > bytes ? "it is truncated" : "it has more bytes than its header says";
  return nullptr;
}

CodedWeight::CodedWeight(const WeightOnlyHeader& header, const void* data) {
  bits = header.bits;
  n = header.n;
  k = header.k;
  group = header.group;
  panels = packed_panels(n, header.gated != 0);
  k_tiles = ceil_div(k, kCodedTileK);
  panel_bytes = k_tiles * 2 * coded_tile_bytes(bits);
  columns = panels * kPanelColumns;
  codes = static_cast<const uint8_t*>(data) + sizeof(header);
  scale = reinterpret_cast<const float*>(codes + panels * panel_bytes);
  const auto* zeros = reinterpret_cast<const int8_t*>(scale + group_count(k, group) * columns);
  zero_point = header.has_zero_point != 0 ? zeros : nullptr;
}

bool pack_weight_only(const WeightOnlyPackCall& call) {
  std::memcpy(call.packed, &call.header, sizeof(call.header));
  const CodedWeight weight(call.header, call.packed);
  std::atomic<bool> fits{true};
  const int64_t threads = std::clamp<int64_t>(weight.panels, 1, max_threads());
  parallel(static_cast<int>(threads), [&](int thread, int count) {
    for (int64_t panel = weight.panels * thread / count; panel < weight.panels * (thread + 1) / count; ++panel) {
      auto* codes = const_cast<uint8_t*>(weight.codes) + panel * weight.panel_bytes;
      const bool codes_fit = pack_codes(call, panel, codes);
      if (!pack_scales(call, weight, panel) || !codes_fit) fits = false;
    }
  });
  return fits;
}

}  // namespace xopt
