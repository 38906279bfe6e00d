// Plain C++ in place of the AMX and AVX512-BF16 instructions, for builds with XOPT_EMULATE: the kernels of these levels
// then run, and run under sanitizers (which see no tile access), on machines that lack them. Never in a release build.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "tiles/level.h"

namespace xopt::XOPT_ISA {

struct EmulatedTile {
  alignas(64) uint8_t bytes[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];
inline thread_local uint8_t emulated_rows[8];

XOPT_INLINE float bf16_bits(uint32_t bits) {
  bits <<= 16;
  float x;
  std::memcpy(&x, &bits, 4);
  // The hardware takes denormals for zero.
  return (bits & 0x7f800000U) == 0 ? 0.0F : x;
}

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

inline void emulated_dot_bf16(int c, int a, int b) {
  for (int r = 0; r < emulated_rows[c]; ++r) {
    float sum[16];
    std::memcpy(sum, emulated_tiles[c].bytes[r], 64);
    for (int k = 0; k < 16; ++k) {
      uint16_t x[2];
      std::memcpy(x, emulated_tiles[a].bytes[r] + 4 * k, 4);
      uint16_t w[32];
      std::memcpy(w, emulated_tiles[b].bytes[k], 64);
      for (int n = 0; n < 16; ++n) {
        sum[n] += bf16_bits(x[0]) * bf16_bits(w[2 * n]);
        sum[n] += bf16_bits(x[1]) * bf16_bits(w[2 * n + 1]);
      }
    }
    std::memcpy(emulated_tiles[c].bytes[r], sum, 64);
  }
}

template <class A>
void emulated_dot_int8(int c, int a, int b) {
  for (int r = 0; r < emulated_rows[c]; ++r) {
    int32_t sum[16];
    std::memcpy(sum, emulated_tiles[c].bytes[r], 64);
    for (int k = 0; k < 64; ++k) {
      const auto x = static_cast<A>(emulated_tiles[a].bytes[r][k]);
      for (int n = 0; n < 16; ++n) {
        sum[n] += x * static_cast<int8_t>(emulated_tiles[b].bytes[k / 4][n * 4 + k % 4]);
      }
    }
    std::memcpy(emulated_tiles[c].bytes[r], sum, 64);
  }
}

// acc + the dot products of 16 pairs.
XOPT_INLINE __m512 emulated_dpbf16(__m512 acc, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  auto value = [](__m512i bits) {
    const __mmask16 normal = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(normal, bits));
  };
  acc = _mm512_fmadd_ps(value(_mm512_slli_epi32(a, 16)), value(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(value(_mm512_and_si512(a, high)), value(_mm512_and_si512(b, high)), acc);
}

}  // namespace xopt::XOPT_ISA
