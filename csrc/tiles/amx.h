// AMX tiles: 8 registers of 16 rows of 64 bytes. Tile numbers are immediates of the instructions, hence the macros.
#pragma once

#include "tiles/level.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AMX
#include <immintrin.h>

#include <cstdint>

#ifdef XOPT_EMULATE
#include "tiles/emulate.h"
#define XOPT_TILE_LOAD(T, BASE, STRIDE) emulated_load(T, BASE, STRIDE)
#define XOPT_TILE_STREAM(T, BASE, STRIDE) emulated_load(T, BASE, STRIDE)
#define XOPT_TILE_STORE(T, BASE, STRIDE) emulated_store(T, BASE, STRIDE)
#define XOPT_TILE_ZERO(T) emulated_zero(T)
#define XOPT_TILE_DOT_BF16(C, A, B) emulated_dot_bf16(C, A, B)
#define XOPT_TILE_DOT_S8S8(C, A, B) emulated_dot_int8<int8_t>(C, A, B)
#define XOPT_TILE_DOT_U8S8(C, A, B) emulated_dot_int8<uint8_t>(C, A, B)
#else
#define XOPT_TILE_LOAD(T, BASE, STRIDE) _tile_loadd(T, BASE, STRIDE)
// The same load with the hint not to keep the line in L1.
#define XOPT_TILE_STREAM(T, BASE, STRIDE) _tile_stream_loadd(T, BASE, STRIDE)
#define XOPT_TILE_STORE(T, BASE, STRIDE) _tile_stored(T, BASE, STRIDE)
#define XOPT_TILE_ZERO(T) _tile_zero(T)
#define XOPT_TILE_DOT_BF16(C, A, B) _tile_dpbf16ps(C, A, B)
#define XOPT_TILE_DOT_S8S8(C, A, B) _tile_dpbssd(C, A, B)
#define XOPT_TILE_DOT_U8S8(C, A, B) _tile_dpbusd(C, A, B)
#endif

namespace xopt::XOPT_ISA {

// The one configuration that all kernels use: every tile 16 rows of 64 bytes. Tails are padded in scratch rather than
// by another configuration, whose change costs more than the padding.
class TileScope {
 public:
  TileScope() {
#ifdef XOPT_EMULATE
    for (auto& rows : emulated_rows) rows = 16;
#else
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const volatile Config config;  // volatile: GCC 12 believes that only 8 of its bytes are read
    _tile_loadconfig(const_cast<const Config*>(&config));
#endif
  }
  // Giving the state back keeps context switches cheap and lets the core sleep.
  ~TileScope() {
#ifndef XOPT_EMULATE
    _tile_release();
#endif
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// While tiles multiply, the vectors' multipliers have nothing to do and fall asleep: on Granite Rapids after 750 ns, and
// then to store tiles takes 280 ns longer (csrc/README.md). An instruction for them in each step of a product keeps them
// awake: sums of integers and permutations go elsewhere.
class VectorsAwake {
 public:
  XOPT_INLINE void step() {
#ifndef XOPT_EMULATE
    asm volatile("vmaxps %0, %0, %0" : "+v"(zero_));
#endif
  }

 private:
#ifndef XOPT_EMULATE
  __m512 zero_ = _mm512_setzero_ps();
#endif
};

}  // namespace xopt::XOPT_ISA
#endif
