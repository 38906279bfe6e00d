// The AMX and AVX512-BF16 instructions by those of the levels below, for builds with XOPT_EMULATE: the kernels of these
// levels then run, and run under sanitizers (which see no tile access), on machines that lack them. Never in a release
// build.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "tiles/level.h"

namespace xopt::XOPT_ISA {

struct EmulatedTile {
  alignas(64) uint8_t bytes[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];
inline thread_local uint8_t emulated_rows[8];

inline void emulated_load(int tile, const void* base, int64_t stride) {
  for (int r = 0; r < emulated_rows[tile]; ++r) {
    std::memcpy(emulated_tiles[tile].bytes[r], static_cast<const uint8_t*>(base) + r * stride, 64);
  }
}
inline void emulated_store(int tile, void* base, int64_t stride) {
  for (int r = 0; r < emulated_rows[tile]; ++r) {
    std::memcpy(static_cast<uint8_t*>(base) + r * stride, emulated_tiles[tile].bytes[r], 64);
  }
}
inline void emulated_zero(int tile) { std::memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile)); }

// acc + the dot products of 16 pairs.
XOPT_INLINE __m512 emulated_dpbf16(__m512 acc, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  // The hardware takes denormals for zero.
  auto value = [](__m512i bits) {
    const __mmask16 normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(normal, bits));
  };
  acc = _mm512_fmadd_ps(value(_mm512_slli_epi32(a, 16)), value(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(value(_mm512_and_si512(a, high)), value(_mm512_and_si512(b, high)), acc);
}

// Four bytes of row `r` of tile `a` for each four of columns.
inline __m512i emulated_group(int a, int r, int group) {
  int32_t bytes;
  std::memcpy(&bytes, emulated_tiles[a].bytes[r] + 4 * group, 4);
  return _mm512_set1_epi32(bytes);
}

inline void emulated_dot_bf16(int c, int a, int b) {
  for (int r = 0; r < emulated_rows[c]; ++r) {
    __m512 sum = _mm512_load_ps(emulated_tiles[c].bytes[r]);
    for (int k = 0; k < 16; ++k) {
      sum = emulated_dpbf16(sum, emulated_group(a, r, k), _mm512_load_si512(emulated_tiles[b].bytes[k]));
    }
    _mm512_store_ps(emulated_tiles[c].bytes[r], sum);
  }
}

// By AVX512-VNNI, whose first factor is unsigned: of a signed one 128 more, which is taken off again.
template <class A>
void emulated_dot_int8(int c, int a, int b) {
  const __m512i offset = _mm512_set1_epi32(static_cast<int>(std::is_signed_v<A> ? 0x80808080U : 0U));
  for (int r = 0; r < emulated_rows[c]; ++r) {
    __m512i sum = _mm512_load_si512(emulated_tiles[c].bytes[r]);
    __m512i excess = _mm512_setzero_si512();
    for (int k = 0; k < 16; ++k) {
      const __m512i w = _mm512_load_si512(emulated_tiles[b].bytes[k]);
      sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(emulated_group(a, r, k), offset), w);
      excess = _mm512_dpbusd_epi32(excess, offset, w);
    }
    _mm512_store_si512(emulated_tiles[c].bytes[r], _mm512_sub_epi32(sum, excess));
  }
}

}  // namespace xopt::XOPT_ISA
