// A sub-group's tiles: A (TM x TK), B (TK x TN) and sums (TM x TN), on the device's matrix units by joint_matrix (XMX on
// GPUs, AMX on CPUs) or, where XOPT_MATRIX is 0, on its vectors: then a work-item holds one column of B and of the sums.
// Loops are written once on them, and the plain tiles run the very shapes that a matrix unit would.
//
// Build options: XOPT_DTYPE_<bf16|f16|f32|s8|u8> (of A; B is s8 where A is u8), XOPT_MATRIX, XOPT_TM, XOPT_TN, XOPT_TK,
// XOPT_SG (work-items in a sub-group; without matrix units, TN).
//
// B lies as a packed weight does (kernels/packed.h): rows of 16 columns, each with a group of k values in 4 bytes, so
// that a tile of half the depth or half the width is a part of a packed tile.
#pragma once

#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>
#if XOPT_MATRIX
#include <sycl/ext/oneapi/matrix/matrix.hpp>
#else
#include <sycl/sub_group.hpp>
#endif

#include "sycl/device/values.h"

namespace syclexp = sycl::ext::oneapi::experimental;

namespace xopt::device {

// `Stored`: an element of B in memory. `Staged`: an element of A as it lies in local memory.
#if defined(XOPT_DTYPE_bf16) || defined(XOPT_DTYPE_f16)
using Stored = uint16_t;
using Sum = float;
#if XOPT_MATRIX
using Staged = uint16_t;
#else
using Staged = float;
#endif
#elif defined(XOPT_DTYPE_f32)
using Stored = float;
using Staged = float;
using Sum = float;
#else
using Stored = int8_t;
using Sum = int32_t;
#if XOPT_MATRIX
#if defined(XOPT_DTYPE_u8)
using Staged = uint8_t;
#else
using Staged = int8_t;
#endif
#else
using Staged = int32_t;
#endif
#endif

#if defined(XOPT_DTYPE_bf16)
constexpr DType kCompute = DType::bf16;
#elif defined(XOPT_DTYPE_f16)
constexpr DType kCompute = DType::f16;
#elif defined(XOPT_DTYPE_f32)
constexpr DType kCompute = DType::f32;
#elif defined(XOPT_DTYPE_u8)
constexpr DType kCompute = DType::u8;
#else
constexpr DType kCompute = DType::s8;
#endif

constexpr int kTileM = XOPT_TM, kTileN = XOPT_TN, kTileK = XOPT_TK, kLanes = XOPT_SG;
constexpr int kGroup = 4 / sizeof(Stored);         // k values side by side
constexpr int kPackedRow = kTileColumns * kGroup;  // elements of a row of packed B
constexpr int kPackedK = static_cast<int>(packed_tile_k(kCompute == DType::u8 ? DType::s8 : kCompute));
static_assert(kPackedK % kTileK == 0 && kTileColumns % kTileN == 0 && kTileK % kGroup == 0);

constexpr bool kIsInteger = kCompute == DType::s8 || kCompute == DType::u8;

// A value on its way into local memory.
inline Staged staged(const void* data, DType dtype, int64_t index) {
  if constexpr (kIsInteger) {
    return kCompute == DType::u8 ? static_cast<Staged>(static_cast<const uint8_t*>(data)[index])
                                 : static_cast<Staged>(static_cast<const int8_t*>(data)[index]);
  } else if constexpr (sizeof(Staged) == 2) {
    if (dtype == kCompute) return static_cast<Staged>(static_cast<const uint16_t*>(data)[index]);
    const uint32_t bits = float_bits(load_float(data, dtype, index));
    return static_cast<Staged>(kCompute == DType::bf16 ? bf16_from_f32_bits(bits) : f16_from_f32_bits(bits));
  } else {
    const float value = load_float(data, dtype, index);
    return static_cast<Staged>(dtype == kCompute ? value : rounded(value, kCompute));
  }
}

// A float as an element of A, rounded only where matrix units take no other.
inline Staged staged_value(float value) {
  if constexpr (sizeof(Staged) == 2) {
    const uint32_t bits = float_bits(value);
    return static_cast<Staged>(kCompute == DType::bf16 ? bf16_from_f32_bits(bits) : f16_from_f32_bits(bits));
  } else {
    return static_cast<Staged>(value);
  }
}

#if XOPT_MATRIX

namespace matrix = sycl::ext::oneapi::experimental::matrix;
#if defined(XOPT_DTYPE_bf16)
using ElementA = sycl::ext::oneapi::bfloat16;
using ElementB = ElementA;
#elif defined(XOPT_DTYPE_f16)
using ElementA = sycl::half;
using ElementB = ElementA;
#else
using ElementA = Staged;
using ElementB = Stored;
#endif

template <sycl::access::address_space Space, class T>
inline auto in_space(T* pointer) {
  return sycl::address_space_cast<Space, sycl::access::decorated::no>(pointer);
}
inline sycl::sub_group sub_group() { return sycl::ext::oneapi::this_work_item::get_sub_group(); }

struct TileA {
  matrix::joint_matrix<sycl::sub_group, ElementA, matrix::use::a, kTileM, kTileK, matrix::layout::row_major> tile;
  void load(const Staged* local, int stride) {
    auto* data = reinterpret_cast<ElementA*>(const_cast<Staged*>(local));
    matrix::joint_matrix_load(sub_group(), tile, in_space<sycl::access::address_space::local_space>(data), stride);
  }
};

struct TileB {
  matrix::joint_matrix<sycl::sub_group, ElementB, matrix::use::b, kTileK, kTileN, matrix::layout::ext_intel_packed>
      tile;
  template <sycl::access::address_space Space>
  void load_packed(const Stored* packed) {
    auto* data = reinterpret_cast<ElementB*>(const_cast<Stored*>(packed));
    matrix::joint_matrix_load(sub_group(), tile, in_space<Space>(data), kPackedRow);
  }
  void load(const Stored* packed) { load_packed<sycl::access::address_space::global_space>(packed); }
  void load_local(const Stored* packed) { load_packed<sycl::access::address_space::local_space>(packed); }
};

struct TileSum {
  matrix::joint_matrix<sycl::sub_group, Sum, matrix::use::accumulator, kTileM, kTileN> tile;
  void clear() { matrix::joint_matrix_fill(sub_group(), tile, Sum(0)); }
  void add_product(const TileA& a, const TileB& b) {
    matrix::joint_matrix_mad(sub_group(), tile, a.tile, b.tile, tile);
  }
  void load(Sum* local, int stride) {
    matrix::joint_matrix_load(sub_group(), tile, in_space<sycl::access::address_space::local_space>(local), stride,
                              matrix::layout::row_major);
  }
  void store(Sum* local, int stride) const {
    matrix::joint_matrix_store(sub_group(), tile, in_space<sycl::access::address_space::local_space>(local), stride,
                               matrix::layout::row_major);
  }
};

#else

static_assert(kLanes == kTileN, "without matrix units, each work-item has a column");

inline int lane() { return static_cast<int>(sycl::ext::oneapi::this_work_item::get_sub_group().get_local_linear_id()); }

struct TileA {
  const Staged* data;
  int stride;
  void load(const Staged* local, int row_stride) {
    data = local;
    stride = row_stride;
  }
};

struct TileB {
  Staged column[kTileK];
  void load(const Stored* packed) {
    packed += lane() * kGroup;
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
      const Stored value = packed[k / kGroup * kPackedRow + k % kGroup];
      if constexpr (kCompute == DType::bf16) {
        column[k] = bits_float(f32_bits_from_bf16(value));
      } else if constexpr (kCompute == DType::f16) {
        column[k] = bits_float(f32_bits_from_f16(value));
      } else {
        column[k] = static_cast<Staged>(value);
      }
    }
  }
  void load_local(const Stored* packed) { load(packed); }
};

struct TileSum {
  Sum rows[kTileM];
  void clear() {
#pragma unroll
    for (Sum& row : rows) row = 0;
  }
  void add_product(const TileA& a, const TileB& b) {
#pragma unroll
    for (int k = 0; k < kTileK; ++k) {
#pragma unroll
      for (int row = 0; row < kTileM; ++row) rows[row] += a.data[row * a.stride + k] * b.column[k];
    }
  }
  void load(const Sum* local, int stride) {
#pragma unroll
    for (int row = 0; row < kTileM; ++row) rows[row] = local[row * stride + lane()];
  }
  void store(Sum* local, int stride) const {
#pragma unroll
    for (int row = 0; row < kTileM; ++row) local[row * stride + lane()] = rows[row];
  }
};

#endif

}  // namespace xopt::device
