// What this CPU can do, as levels. Each level implies all below it; a kernel source is compiled once per level.
//
// Detection asks CPUID, XGETBV and the kernel's AMX permission, never the model's name: a hypervisor may mask any of
// it. The header is free of STL containers because kernels include it.
#pragma once

#include <cstdint>

namespace xopt {

enum class Isa : int { scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx };
inline constexpr int kIsaCount = 6;

// "scalar", "avx2", ... ; the names are those of the C++ namespaces and of XOPT_MAX_ISA.
const char* isa_name(Isa isa);

// A feature counts as present when the CPU has it and the operating system saves the registers it needs.
struct CpuFeatures {
  char brand[49];
  bool avx2, fma, f16c;
  bool avx512f, avx512bw, avx512dq, avx512vl, avx512vbmi, avx512_vnni, avx512_bf16, avx512_fp16;
  bool amx_tile, amx_int8, amx_bf16, amx_fp16;
  bool amx_permitted;                     // the kernel granted the tile state to this process
  bool emulated;                          // a build for tests, of AMX and AVX512-BF16 by the levels below
  int64_t l1d_bytes, l2_bytes, l3_bytes;  // 0 where CPUID does not tell
  int64_t l1d_ways;                       // likewise
};

const CpuFeatures& cpu_features();
// For plans: where CPUID does not tell, what most have.
int64_t l2_bytes();
int64_t l1d_ways();

// The highest level whose features, and those of all levels below it, are there.
Isa level_of(const CpuFeatures& features);

// The highest level that this process may use: level_of(cpu_features()).
Isa detected_isa();
// detected_isa(), or the cap if that is lower. Kernels are chosen by it.
Isa active_isa();
// Caps the level, in place of an earlier cap; takes effect for every kernel looked up afterwards.
void cap_isa(Isa isa);

}  // namespace xopt
