// Packing and unpacking of weights, and the header of a packed weight. The layout is described in packed.h.
//
// A tile is a 16x16 transpose of 4-byte units: 16 output columns, each with 64 bytes of its k run (of the packed
// dtype). So packing goes tile by tile: convert 16 runs into a block of 1 KB in L1, transpose it on its way out.
// Every byte of the source and of the destination is touched once, and memory speed is the limit.
#include "kernels/packed.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/convert.h"
#include "runtime/parallel.h"

namespace xopt {
namespace {

constexpr char kMagic[8] = {'x', 'o', 'p', 't', 'p', 'a', 'c', 'k'};
constexpr uint16_t kVersion = 1;
constexpr int64_t kRunBytes = 64;                      // of one output column within a tile
constexpr int64_t kColumnBytes = 3 * sizeof(int32_t);  // int8: scale, column sum and zero point of a column
constexpr int64_t kBytesPerThread = 256 * 1024;        // less is not worth a thread

bool is_weight_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::s8;
}

// ---- Blocks: 16 runs of 64 bytes -----------------------------------------------------------------------------------

struct alignas(64) Block {
  uint32_t runs[kTileColumns][kTileRows];  // [output column][4-byte unit along k]
};

void transpose(const uint32_t* from, uint32_t* to) {
  for (int row = 0; row < 16; row += 4) {
    for (int column = 0; column < 16; column += 4) {
      const auto load = [&](int r) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (row + r) * 16 + column));
      };
      const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
      const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
      const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
      const auto store = [&](int r, __m128i value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (column + r) * 16 + row), value);
      };
      store(0, _mm_unpacklo_epi64(ab_low, cd_low));
      store(1, _mm_unpackhi_epi64(ab_low, cd_low));
      store(2, _mm_unpacklo_epi64(ab_high, cd_high));
      store(3, _mm_unpackhi_epi64(ab_high, cd_high));
    }
  }
}

// Storage of a dtype's value, and the way to and from its fp32 bits.
struct F32 {
  using Bits = uint32_t;
  static uint32_t to_f32(uint32_t bits) { return bits; }
  static uint32_t from_f32(uint32_t bits) { return bits; }
};
struct Bf16 {
  using Bits = uint16_t;
  static uint32_t to_f32(uint32_t bits) { return f32_bits_from_bf16(bits); }
  static uint32_t from_f32(uint32_t bits) { return bf16_from_f32_bits(bits); }
};
struct F16 {
  using Bits = uint16_t;
  static uint32_t to_f32(uint32_t bits) { return f32_bits_from_f16(bits); }
  static uint32_t from_f32(uint32_t bits) { return f16_from_f32_bits(bits); }
};
struct S8 {
  using Bits = uint8_t;
  static uint32_t to_f32(uint32_t bits) { return bits; }
  static uint32_t from_f32(uint32_t bits) { return bits; }
};

// SSE2 packs with signed saturation only, which keeps 16 bits that were sign-extended before.
void narrow_run(const uint32_t* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    const auto load = [&](int64_t at) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      return _mm_srai_epi32(_mm_slli_epi32(value, 16), 16);
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi32(load(i), load(i + 4)));
  }
}

// A whole run of contiguous values.
template <class From, class To>
void convert_run(const typename From::Bits* from, typename To::Bits* to) {
  constexpr int64_t kRun = kRunBytes / sizeof(typename To::Bits);
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, kRunBytes);
  } else if constexpr (sizeof(typename To::Bits) == sizeof(uint16_t)) {
    uint32_t wide[kRun];
#pragma GCC unroll 1
    for (int64_t i = 0; i < kRun; ++i) wide[i] = To::from_f32(From::to_f32(from[i]));
    narrow_run(wide, to, kRun);
  } else {
#pragma GCC unroll 1
    for (int64_t i = 0; i < kRun; ++i) to[i] = To::from_f32(From::to_f32(from[i]));
  }
}

// Fills `block` with columns [n, n + columns) and k values [k, k + count) of the source, padded with zeros. What is
// strided or short is staged as whole contiguous runs first.
template <class From, class To>
void load_block(const MatrixView& source, int64_t n, int64_t columns, int64_t k, int64_t count, Block* block) {
  constexpr int64_t kRun = kRunBytes / sizeof(typename To::Bits);
  using Bits = typename From::Bits;
  const int64_t along_n = source.row_stride, along_k = source.column_stride;
  const Bits* data = static_cast<const Bits*>(source.data) + n * along_n + k * along_k;
  auto* runs = reinterpret_cast<typename To::Bits*>(block->runs);
  if (columns < kTileColumns) std::memset(block, 0, sizeof(Block));

  if (along_k == 1 && count == kRun) {
    for (int64_t column = 0; column < columns; ++column) {
      convert_run<From, To>(data + column * along_n, runs + column * kRun);
    }
    return;
  }
  Bits staged[kTileColumns][kRun];
  if (count < kRun) std::memset(staged, 0, sizeof(staged));
  if (along_n == 1) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t column = 0; column < columns; ++column) staged[column][i] = data[column + i * along_k];
    }
  } else {
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t i = 0; i < count; ++i) staged[column][i] = data[column * along_n + i * along_k];
    }
  }
  for (int64_t column = 0; column < columns; ++column) convert_run<From, To>(staged[column], runs + column * kRun);
}

using LoadBlock = void (*)(const MatrixView&, int64_t n, int64_t columns, int64_t k, int64_t count, Block*);

template <class To>
LoadBlock load_block_from(DType from) {
  switch (from) {
    case DType::f32:
      return load_block<F32, To>;
    case DType::bf16:
      return load_block<Bf16, To>;
    default:
      return load_block<F16, To>;
  }
}

LoadBlock choose_load_block(DType from, DType to) {
  switch (to) {
    case DType::f32:
      return load_block_from<F32>(from);
    case DType::bf16:
      return load_block_from<Bf16>(from);
    case DType::f16:
      return load_block_from<F16>(from);
    default:
      return load_block<S8, S8>;
  }
}

// ---- Columns of a panel --------------------------------------------------------------------------------------------

// Where the 16 columns of a tile (half of a panel) come from: which of the two weights, and which of its columns.
struct TileColumns {
  bool from_up;
  int64_t first;
  int64_t count;  // of real columns, 0 to 16

  TileColumns(const PackedHeader& header, int64_t panel, int64_t half)
      : from_up(header.gated && half == 1),
        first(header.gated ? panel * kTileColumns : panel * kPanelColumns + half * kTileColumns),
        count(std::clamp<int64_t>(header.n - first, 0, kTileColumns)) {}

  // Index among the values given for all columns: gate's, then up's.
  int64_t value_index(const PackedHeader& header) const { return (from_up ? header.n : 0) + first; }
};

struct Parts {
  uint8_t* panels;
  uint8_t* scale;
  uint8_t* column_sum;
  uint8_t* zero_point;
  int64_t panel_count, panel_bytes, k_tiles;

  Parts(const PackedHeader& header, void* packed)
      : panels(static_cast<uint8_t*>(packed) + sizeof(PackedHeader)),
        panel_count(packed_panels(header.n, header.gated != 0)),
        panel_bytes(packed_panel_bytes(header.dtype, header.k)),
        k_tiles(panel_bytes / (2 * kTileBytes)) {
    const int64_t padded = panel_count * kPanelColumns;
    scale = panels + panel_count * panel_bytes;
    column_sum = scale + padded * static_cast<int64_t>(sizeof(float));
    zero_point = column_sum + padded * static_cast<int64_t>(sizeof(int32_t));
  }

  uint8_t* tile(int64_t panel, int64_t k_tile, int64_t half) const {
    return panels + panel * panel_bytes + (k_tile * 2 + half) * kTileBytes;
  }
};

template <class Body>
void for_each_panel(const Parts& parts, const Body& body) {
  const int64_t bytes = parts.panel_count * parts.panel_bytes;
  const int64_t wanted = std::min(parts.panel_count, bytes / kBytesPerThread + 1);
  const int threads = static_cast<int>(std::clamp<int64_t>(wanted, 1, max_threads()));
  parallel(threads, [&](int thread, int count) {
    const int64_t end = parts.panel_count * (thread + 1) / count;
    for (int64_t panel = parts.panel_count * thread / count; panel < end; ++panel) body(panel);
  });
}

// ---- int8: what is kept for each column ----------------------------------------------------------------------------

void add_column_sums(const Block& block, int32_t* sums) {
  const auto* values = reinterpret_cast<const int8_t*>(block.runs);
  for (int64_t column = 0; column < kTileColumns; ++column) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kRunBytes; ++i) sum += values[column * kRunBytes + i];
    sums[column] += sum;
  }
}

void pack_column_values(const PackCall& call, const Parts& parts, const TileColumns& columns, int64_t packed_column,
                        const int32_t* sums) {
  float scale[kTileColumns] = {};
  int32_t zero_point[kTileColumns] = {};
  const int64_t from = columns.value_index(call.header);
  std::copy_n(call.scale + from, columns.count, scale);
  if (call.zero_point != nullptr) std::copy_n(call.zero_point + from, columns.count, zero_point);
  const int64_t offset = packed_column * static_cast<int64_t>(sizeof(int32_t));
  std::memcpy(parts.scale + offset, scale, sizeof(scale));
  std::memcpy(parts.column_sum + offset, sums, sizeof(scale));
  std::memcpy(parts.zero_point + offset, zero_point, sizeof(zero_point));
}

void unpack_column_values(const UnpackCall& call, const PackedHeader& header, const Parts& parts,
                          const TileColumns& columns, int64_t packed_column) {
  const int64_t offset = packed_column * static_cast<int64_t>(sizeof(int32_t));
  const int64_t to = columns.value_index(header);
  const size_t bytes = static_cast<size_t>(columns.count) * sizeof(int32_t);
  if (bytes == 0) return;
  if (call.scale != nullptr) std::memcpy(call.scale + to, parts.scale + offset, bytes);
  if (call.zero_point != nullptr) std::memcpy(call.zero_point + to, parts.zero_point + offset, bytes);
}

}  // namespace

uint32_t header_checksum(const void* header) {
  const auto* bytes = static_cast<const uint8_t*>(header);
  uint32_t hash = 2166136261U;
  for (size_t i = 0; i < offsetof(PackedHeader, checksum); ++i) hash = (hash ^ bytes[i]) * 16777619U;
  return hash;
}

bool packed_header_init(PackedHeader* header, DType dtype, int64_t n, int64_t k, bool gated, bool has_zero_point) {
  constexpr int64_t kMost = int64_t{1} << 56;  // so that rounding up cannot overflow
  if (n < 0 || k < 0 || n > kMost || k > kMost || !is_weight_dtype(dtype)) return false;
  const int64_t k_tiles = (k + packed_tile_k(dtype) - 1) / packed_tile_k(dtype);
  int64_t panel_bytes = 0, bytes = 0;
  if (__builtin_mul_overflow(k_tiles, 2 * kTileBytes, &panel_bytes)) return false;
  const int64_t column_bytes = dtype == DType::s8 ? kPanelColumns * kColumnBytes : 0;
  if (__builtin_add_overflow(panel_bytes, column_bytes, &panel_bytes)) return false;
  if (__builtin_mul_overflow(packed_panels(n, gated), panel_bytes, &bytes)) return false;
  if (__builtin_add_overflow(bytes, static_cast<int64_t>(sizeof(PackedHeader)), &bytes)) return false;

  *header = PackedHeader{};
  std::memcpy(header->magic, kMagic, sizeof(kMagic));
  header->version = kVersion;
  header->dtype = dtype;
  header->gated = gated ? 1 : 0;
  header->has_zero_point = has_zero_point ? 1 : 0;
  header->n = n;
  header->k = k;
  header->bytes = bytes;
  header->checksum = header_checksum(header);
  return true;
}

namespace {

// With a header that packed_header_init would not have made.
const char* what_is_wrong(const PackedHeader& header) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return "it does not begin with 'xoptpack'";
  if (header.checksum != header_checksum(&header)) return "its header is corrupted (wrong checksum)";
  if (header.version != kVersion) return "it has the layout of another version of xopt";
  return "its header contradicts itself";
}

}  // namespace

const char* packed_header_error(const void* data, int64_t bytes) {
  if (bytes < static_cast<int64_t>(sizeof(PackedHeader))) return "it is shorter than the 64 bytes of a header";
  PackedHeader header;
  std::memcpy(&header, data, sizeof(header));
  PackedHeader made;
  const bool could_be_made =
      packed_header_init(&made, header.dtype, header.n, header.k, header.gated != 0, header.has_zero_point != 0);
  if (!could_be_made || std::memcmp(&made, &header, sizeof(header)) != 0) return what_is_wrong(header);
  if (header.bytes > bytes) return "it is truncated";
  if (header.bytes < bytes) return "it has more bytes than its header says";
  return nullptr;
}

namespace {

PackedHeader read_header(const void* data) {
  PackedHeader header;
  std::memcpy(&header, data, sizeof(header));
  return header;
}

}  // namespace

PackedWeight::PackedWeight(const void* data) : PackedWeight(read_header(data), data) {}

PackedWeight::PackedWeight(const PackedHeader& header, const void* data) {
  const Parts parts(header, const_cast<void*>(data));
  dtype = header.dtype;
  gated = header.gated != 0;
  n = header.n;
  k = header.k;
  panels = parts.panel_count;
  panel_bytes = parts.panel_bytes;
  k_tiles = parts.k_tiles;
  panel_data = parts.panels;
  const bool is_int8 = dtype == DType::s8;
  scale = is_int8 ? reinterpret_cast<const float*>(parts.scale) : nullptr;
  column_sum = is_int8 ? reinterpret_cast<const int32_t*>(parts.column_sum) : nullptr;
  zero_point = is_int8 && header.has_zero_point ? reinterpret_cast<const int32_t*>(parts.zero_point) : nullptr;
}

PackedWeight PackedWeight::columns(int64_t first, int64_t count) const {
  PackedWeight part = *this;
  part.n = count;
  part.panels = packed_panels(count, gated);
  part.first_panel += first / kPanelColumns;
  part.panel_data += first / kPanelColumns * panel_bytes;
  if (scale != nullptr) part.scale += first;
  if (column_sum != nullptr) part.column_sum += first;
  if (zero_point != nullptr) part.zero_point += first;
  return part;
}

void pack_weight(const PackCall& call) {
  const PackedHeader& header = call.header;
  std::memcpy(call.packed, &header, sizeof(header));
  const Parts parts(header, call.packed);
  const int64_t tile_k = packed_tile_k(header.dtype);
  const bool is_int8 = header.dtype == DType::s8;

  for_each_panel(parts, [&](int64_t panel) {
    const TileColumns halves[2] = {TileColumns(header, panel, 0), TileColumns(header, panel, 1)};
    const MatrixView* sources[2] = {&call.weight, halves[1].from_up ? &call.up : &call.weight};
    int32_t sums[2][kTileColumns] = {};
    for (int64_t k_tile = 0; k_tile < parts.k_tiles; ++k_tile) {
      const int64_t k = k_tile * tile_k;
      for (int64_t half = 0; half < 2; ++half) {
        Block block;
        const LoadBlock load = choose_load_block(sources[half]->dtype, header.dtype);
        load(*sources[half], halves[half].first, halves[half].count, k, std::min(tile_k, header.k - k), &block);
        if (is_int8) add_column_sums(block, sums[half]);
        transpose(block.runs[0], reinterpret_cast<uint32_t*>(parts.tile(panel, k_tile, half)));
      }
    }
    for (int64_t half = 0; is_int8 && half < 2; ++half) {
      pack_column_values(call, parts, halves[half], panel * kPanelColumns + half * kTileColumns, sums[half]);
    }
  });
}

void unpack_weight(const UnpackCall& call) {
  PackedHeader header;
  std::memcpy(&header, call.packed, sizeof(header));
  const Parts parts(header, const_cast<void*>(call.packed));
  const int64_t element = dtype_size(header.dtype);

  for_each_panel(parts, [&](int64_t panel) {
    for (int64_t half = 0; half < 2; ++half) {
      const TileColumns columns(header, panel, half);
      auto* to = static_cast<uint8_t*>(columns.from_up ? call.up : call.weight);
      for (int64_t k_tile = 0; k_tile < parts.k_tiles; ++k_tile) {
        Block block;
        transpose(reinterpret_cast<const uint32_t*>(parts.tile(panel, k_tile, half)), block.runs[0]);
        const int64_t offset = k_tile * kRunBytes;
        const auto run = static_cast<size_t>(std::min(kRunBytes, header.k * element - offset));
        for (int64_t column = 0; column < columns.count; ++column) {
          std::memcpy(to + (columns.first + column) * header.k * element + offset, block.runs[column], run);
        }
      }
      if (header.dtype == DType::s8) {
        unpack_column_values(call, header, parts, columns, panel * kPanelColumns + half * kTileColumns);
      }
    }
  });
}

}  // namespace xopt
