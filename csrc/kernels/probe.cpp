// Measures the machine's roofs: see probe.h.
// isa: scalar avx2 avx512 avx512_vnni avx512_bf16 amx
//
// Multiply-add pieces keep kAccumulators independent sums in registers, enough to hide the latency on two ports. Their
// operands make every sum settle at a finite, normal value, so no piece slows down on denormals. The read pieces walk
// a slice per thread, first touched by that thread, with a prefetch well ahead of the loads.
#include "kernels/probe.h"

#include <immintrin.h>
#include <time.h>

#include "runtime/arena.h"
#include "runtime/cpu.h"
#include "runtime/parallel.h"
#include "runtime/registry.h"

namespace xopt::XOPT_ISA {
namespace {

constexpr int kAccumulators = 12;
constexpr int64_t kPageBytes = 4096;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Runs piece(thread) on all threads, `repeats` times. The piece says how much work it did.
template <class Piece>
void measure(ProbeCall& call, const char* instruction, const Piece& piece) {
  call.instruction = instruction;
  call.seconds = 1e30;
  for (int repeat = 0; repeat < call.repeats; ++repeat) {
    const double start = now();
    parallel(call.threads, piece);
    const double seconds = now() - start;
    if (seconds < call.seconds) call.seconds = seconds;
  }
}

// Keeps kAccumulators independent registers going. A Unit has its operands, made of a seed that the compiler cannot
// know, start(j), and step(sum), which does kProducts multiply-adds.
template <class Unit>
void probe_registers(ProbeCall& call) {
  constexpr int64_t kIterations = 1 << 19;
  volatile int seed = 3;
  measure(call, Unit::kInstruction, [&](int, int) {
    const Unit unit(seed);
    typename Unit::Register sums[kAccumulators];
    for (int j = 0; j < kAccumulators; ++j) sums[j] = unit.start(j + 1);
    for (int64_t i = 0; i < kIterations; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < kAccumulators; ++j) sums[j] = unit.step(sums[j]);
    }
    for (int j = 0; j < kAccumulators; ++j) asm volatile("" : : "x"(sums[j]));
  });
  call.work = 2.0 * Unit::kProducts * kAccumulators * static_cast<double>(kIterations) * call.threads;
}

#if XOPT_LEVEL == 0
struct Fp32MultiplyAdd {
  using Register = __m128;
  static constexpr int kProducts = 4;
  static constexpr const char* kInstruction = "fp32 multiply and add, 128 bits";
  explicit Fp32MultiplyAdd(int seed) : factor(_mm_set1_ps(1.0F - 1e-3F * seed)), term(_mm_set1_ps(1e-3F * seed)) {}
  Register start(int j) const { return _mm_set1_ps(static_cast<float>(j)); }
  Register step(Register sum) const { return _mm_add_ps(_mm_mul_ps(sum, factor), term); }
  Register factor, term;
};
XOPT_REGISTER_KERNEL(probe, f32, probe_registers<Fp32MultiplyAdd>);
XOPT_REGISTER_KERNEL(probe, bf16, probe_registers<Fp32MultiplyAdd>);

struct Int8MultiplyAdd {  // products of 16 bits: 8-bit ones are beyond baseline x86-64
  using Register = __m128i;
  static constexpr int kProducts = 8;
  static constexpr const char* kInstruction = "pmaddwd + paddd, 128 bits";
  explicit Int8MultiplyAdd(int seed) : factor(_mm_set1_epi16(static_cast<int16_t>(seed))) {}
  Register start(int j) const { return _mm_set1_epi32(j); }
  Register step(Register sum) const { return _mm_add_epi32(_mm_madd_epi16(sum, factor), factor); }
  Register factor;
};
XOPT_REGISTER_KERNEL(probe, int8, probe_registers<Int8MultiplyAdd>);

#elif XOPT_LEVEL == 1
struct Fp32MultiplyAdd {
  using Register = __m256;
  static constexpr int kProducts = 8;
  static constexpr const char* kInstruction = "fp32 FMA, 256 bits";
  explicit Fp32MultiplyAdd(int seed)
      : factor(_mm256_set1_ps(1.0F - 1e-3F * seed)), term(_mm256_set1_ps(1e-3F * seed)) {}
  Register start(int j) const { return _mm256_set1_ps(static_cast<float>(j)); }
  Register step(Register sum) const { return _mm256_fmadd_ps(sum, factor, term); }
  Register factor, term;
};
XOPT_REGISTER_KERNEL(probe, f32, probe_registers<Fp32MultiplyAdd>);
XOPT_REGISTER_KERNEL(probe, bf16, probe_registers<Fp32MultiplyAdd>);

struct Int8MultiplyAdd {
  using Register = __m256i;
  static constexpr int kProducts = 32;
  static constexpr const char* kInstruction = "vpmaddubsw + vpmaddwd + vpaddd, 256 bits";
  explicit Int8MultiplyAdd(int seed) : factor(_mm256_set1_epi8(static_cast<char>(seed))), ones(_mm256_set1_epi16(1)) {}
  Register start(int j) const { return _mm256_set1_epi32(j); }
  Register step(Register sum) const {
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(sum, factor), ones), factor);
  }
  Register factor, ones;
};
XOPT_REGISTER_KERNEL(probe, int8, probe_registers<Int8MultiplyAdd>);

#elif XOPT_LEVEL == 2
struct Fp32MultiplyAdd {
  using Register = __m512;
  static constexpr int kProducts = 16;
  static constexpr const char* kInstruction = "fp32 FMA, 512 bits";
  explicit Fp32MultiplyAdd(int seed)
      : factor(_mm512_set1_ps(1.0F - 1e-3F * seed)), term(_mm512_set1_ps(1e-3F * seed)) {}
  Register start(int j) const { return _mm512_set1_ps(static_cast<float>(j)); }
  Register step(Register sum) const { return _mm512_fmadd_ps(sum, factor, term); }
  Register factor, term;
};
XOPT_REGISTER_KERNEL(probe, f32, probe_registers<Fp32MultiplyAdd>);
XOPT_REGISTER_KERNEL(probe, bf16, probe_registers<Fp32MultiplyAdd>);

struct Int8MultiplyAdd {
  using Register = __m512i;
  static constexpr int kProducts = 64;
  static constexpr const char* kInstruction = "vpmaddubsw + vpmaddwd + vpaddd, 512 bits";
  explicit Int8MultiplyAdd(int seed) : factor(_mm512_set1_epi8(static_cast<char>(seed))), ones(_mm512_set1_epi16(1)) {}
  Register start(int j) const { return _mm512_set1_epi32(j); }
  Register step(Register sum) const {
    return _mm512_add_epi32(_mm512_madd_epi16(_mm512_maddubs_epi16(sum, factor), ones), factor);
  }
  Register factor, ones;
};
XOPT_REGISTER_KERNEL(probe, int8, probe_registers<Int8MultiplyAdd>);

#elif XOPT_LEVEL == 3
struct Int8Dot {
  using Register = __m512i;
  static constexpr int kProducts = 64;
  static constexpr const char* kInstruction = "vpdpbusd, 512 bits";
  explicit Int8Dot(int seed)
      : a(_mm512_set1_epi8(static_cast<char>(seed))), b(_mm512_set1_epi8(static_cast<char>(-seed))) {}
  Register start(int j) const { return _mm512_set1_epi32(j); }
  Register step(Register sum) const { return _mm512_dpbusd_epi32(sum, a, b); }
  Register a, b;
};
XOPT_REGISTER_KERNEL(probe, int8, probe_registers<Int8Dot>);

#elif XOPT_LEVEL == 4 && !defined(XOPT_EMULATE)
struct Bf16Dot {
  using Register = __m512;
  static constexpr int kProducts = 32;
  static constexpr const char* kInstruction = "vdpbf16ps, 512 bits";
  explicit Bf16Dot(int seed) : a(_mm512_cvtne2ps_pbh(floats(seed), floats(seed))) {}
  static __m512 floats(int seed) { return _mm512_set1_ps(1e-3F * seed); }
  Register start(int j) const { return _mm512_set1_ps(static_cast<float>(j)); }
  Register step(Register sum) const { return _mm512_dpbf16_ps(sum, a, a); }
  __m512bh a;
};
XOPT_REGISTER_KERNEL(probe, bf16, probe_registers<Bf16Dot>);

#elif XOPT_LEVEL == 5 && !defined(XOPT_EMULATE)
constexpr int64_t kIterations = 1 << 17;
constexpr int kProducts = 4;  // 2x2 sums: four products of 16 cycles hide the latency of about 52

struct TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// Eight full tiles: 0-3 are zeroed sums, 4-7 operands that hold `bytes` (1 KB) .
void load_tiles(const uint8_t* bytes) {
  alignas(64) TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.column_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // GCC 12 takes _tile_loadconfig to read 8 bytes only and would drop the other stores.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, bytes, 64);
  _tile_loadd(5, bytes, 64);
  _tile_loadd(6, bytes, 64);
  _tile_loadd(7, bytes, 64);
}

void probe_bf16(ProbeCall& call) {
  measure(call, "AMX tdpbf16ps", [&](int, int) {
    alignas(64) uint16_t values[512];
    for (int i = 0; i < 512; ++i) values[i] = static_cast<uint16_t>((i % 2 ? 0xBC00 : 0x3C00) + i % 127);  // +-0.01
    load_tiles(reinterpret_cast<const uint8_t*>(values));
    for (int64_t i = 0; i < kIterations; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  });
  call.work = 2.0 * 16 * 16 * 32 * kProducts * static_cast<double>(kIterations) * call.threads;
}
XOPT_REGISTER_KERNEL(probe, bf16, probe_bf16);

void probe_int8(ProbeCall& call) {
  measure(call, "AMX tdpbusd", [&](int, int) {
    alignas(64) uint8_t values[1024];
    for (int i = 0; i < 1024; ++i) values[i] = static_cast<uint8_t>(i * 37 + 11);
    load_tiles(values);
    for (int64_t i = 0; i < kIterations; ++i) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
  });
  call.work = 2.0 * 16 * 16 * 64 * kProducts * static_cast<double>(kIterations) * call.threads;
}
XOPT_REGISTER_KERNEL(probe, int8, probe_int8);
#endif

#if XOPT_LEVEL <= 2
constexpr int64_t kPrefetchAhead = 2048;

#if XOPT_LEVEL == 0
using Vector = __m128i;
Vector combine(Vector a, const void* data) {
  return _mm_xor_si128(a, _mm_load_si128(static_cast<const __m128i*>(data)));
}
#elif XOPT_LEVEL == 1
using Vector = __m256i;
Vector combine(Vector a, const void* data) {
  return _mm256_xor_si256(a, _mm256_load_si256(static_cast<const __m256i*>(data)));
}
#else
using Vector = __m512i;
Vector combine(Vector a, const void* data) { return _mm512_xor_si512(a, _mm512_load_si512(data)); }
#endif

void read_slice(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kStep = 256;
  constexpr int kVectors = kStep / sizeof(Vector);
  Vector sums[kVectors] = {};
  for (int64_t offset = 0; offset < bytes; offset += kStep) {
    for (int64_t line = 0; line < kStep; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(data + offset + kPrefetchAhead + line), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      sums[j] = combine(sums[j], data + offset + j * static_cast<int64_t>(sizeof(Vector)));
    }
  }
  for (int j = 0; j < kVectors; ++j) asm volatile("" : : "x"(sums[j]));
}

struct WeightMemory {
  explicit WeightMemory(int64_t bytes) : data(static_cast<uint8_t*>(weight_alloc(static_cast<size_t>(bytes)))) {}
  ~WeightMemory() { weight_free(data); }
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;
  uint8_t* data;
};

void probe_read(ProbeCall& call) {
  constexpr int64_t kLeast = int64_t{256} << 20;
  constexpr int64_t kMost = int64_t{2} << 30;
  int64_t bytes = 4 * cpu_features().l3_bytes;
  bytes = bytes < kLeast ? kLeast : (bytes > kMost ? kMost : bytes);
  const int64_t slice = (bytes / call.threads + kPageBytes - 1) / kPageBytes * kPageBytes;
  const WeightMemory memory(slice * call.threads);
  parallel(call.threads, [&](int thread, int) {
    uint64_t* words = reinterpret_cast<uint64_t*>(memory.data + thread * slice);
    for (int64_t i = 0; i < slice / 8; ++i) words[i] = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15U + 1;
  });
  measure(call, "memory read", [&](int thread, int) { read_slice(memory.data + thread * slice, slice); });
  call.work = static_cast<double>(slice) * call.threads;
}
XOPT_REGISTER_KERNEL(probe, read, probe_read);
#endif

}  // namespace
}  // namespace xopt::XOPT_ISA
