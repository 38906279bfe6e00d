// Detection of the CPU's level by CPUID, XGETBV and the kernel's permission to use AMX tiles.
#include "runtime/cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace xopt {
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU has no such leaf.
Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool bit(uint64_t value, int index) { return ((value >> index) & 1) != 0; }

// XCR0: the register states that the operating system saves at a context switch. 0 without OSXSAVE.
uint64_t saved_states() {
  if (!bit(cpuid(1).ecx, 27)) return 0;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t kYmmStates = (1U << 1) | (1U << 2);
constexpr uint64_t kZmmStates = kYmmStates | (1U << 5) | (1U << 6) | (1U << 7);
constexpr uint64_t kTileStates = (1U << 17) | (1U << 18);

// Linux gives the 8 KB tile state only to a process that asks. Kernels before 5.16 do not know the question, and a
// sandbox may refuse it; both mean no.
bool ask_for_tiles() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

void read_brand(char* brand) {
  if (cpuid(0x80000000).eax < 0x80000004) return;
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002 + i);
    std::memcpy(brand + i * 16, &r, sizeof(r));
  }
  const char* start = brand;
  while (*start == ' ') ++start;
  std::memmove(brand, start, std::strlen(start) + 1);
  for (size_t end = std::strlen(brand); end > 0 && brand[end - 1] == ' '; --end) brand[end - 1] = '\0';
}

// Intel lists its caches in leaf 4, AMD in leaf 0x8000001d, in one format.
void read_caches(CpuFeatures* features) {
  const uint32_t leaf = cpuid(4).eax != 0 ? 4 : 0x8000001d;
  for (uint32_t index = 0; index < 16; ++index) {
    const Registers r = cpuid(leaf, index);
    const uint32_t type = r.eax & 31;
    if (type == 0) return;
    constexpr uint32_t kInstructions = 2;
    if (type == kInstructions) continue;
    const uint32_t level = (r.eax >> 5) & 7;
    const int64_t ways = (r.ebx >> 22) + 1;
    const int64_t partitions = ((r.ebx >> 12) & 0x3ff) + 1;
    const int64_t line = (r.ebx & 0xfff) + 1;
    const int64_t bytes = ways * partitions * line * (static_cast<int64_t>(r.ecx) + 1);
    if (level == 1) {
      features->l1d_bytes = bytes;
      features->l1d_ways = ways;
    }
    if (level == 2) features->l2_bytes = bytes;
    if (level == 3) features->l3_bytes = bytes;
  }
}

CpuFeatures detect() {
  CpuFeatures f{};
  read_brand(f.brand);
  read_caches(&f);
  const uint64_t saved = saved_states();
  const Registers basic = cpuid(1), extended = cpuid(7, 0);
  const Registers more = extended.eax >= 1 ? cpuid(7, 1) : Registers{};

  const bool ymm = (saved & kYmmStates) == kYmmStates;
  f.fma = ymm && bit(basic.ecx, 12);
  f.f16c = ymm && bit(basic.ecx, 29);
  f.avx2 = ymm && bit(basic.ecx, 28) && bit(extended.ebx, 5);

  const bool zmm = (saved & kZmmStates) == kZmmStates;
  f.avx512f = zmm && bit(extended.ebx, 16);
  f.avx512dq = zmm && bit(extended.ebx, 17);
  f.avx512bw = zmm && bit(extended.ebx, 30);
  f.avx512vl = zmm && bit(extended.ebx, 31);
  f.avx512vbmi = zmm && bit(extended.ecx, 1);
  f.avx512_vnni = zmm && bit(extended.ecx, 11);
  f.avx512_fp16 = zmm && bit(extended.edx, 23);
  f.avx512_bf16 = zmm && bit(more.eax, 5);

  const bool tiles = (saved & kTileStates) == kTileStates;
  f.amx_bf16 = tiles && bit(extended.edx, 22);
  f.amx_tile = tiles && bit(extended.edx, 24);
  f.amx_int8 = tiles && bit(extended.edx, 25);
  f.amx_fp16 = tiles && bit(more.eax, 21);
  f.amx_permitted = f.amx_tile && ask_for_tiles();
#ifdef XOPT_EMULATE
  f.emulated = true;
#endif
  return f;
}

// -1: not yet known. A plain atomic, so that asking for the level in every op costs one load.
std::atomic<int> active{-1};

}  // namespace

const char* isa_name(Isa isa) {
  static constexpr const char* kNames[kIsaCount] = {"scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"};
  const int index = static_cast<int>(isa);
  return index >= 0 && index < kIsaCount ? kNames[index] : "unknown";
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

int64_t l2_bytes() { return cpu_features().l2_bytes > 0 ? cpu_features().l2_bytes : 1 << 20; }
int64_t l1d_ways() { return cpu_features().l1d_ways > 0 ? cpu_features().l1d_ways : 8; }

Isa level_of(const CpuFeatures& f) {
  if (!(f.avx2 && f.fma && f.f16c)) return Isa::scalar;
  if (!(f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl)) return Isa::avx2;
  if (!f.avx512_vnni) return Isa::avx512;
  if (f.emulated) return Isa::amx;
  if (!f.avx512_bf16) return Isa::avx512_vnni;
  if (!(f.avx512vbmi && f.amx_tile && f.amx_int8 && f.amx_bf16 && f.amx_permitted)) return Isa::avx512_bf16;
  return Isa::amx;
}

Isa detected_isa() {
  static const Isa isa = level_of(cpu_features());
  return isa;
}

Isa active_isa() {
  int level = active.load(std::memory_order_relaxed);
  if (level < 0) {
    const int detected = static_cast<int>(detected_isa());
    // A cap that another thread sets meanwhile wins.
    if (active.compare_exchange_strong(level, detected, std::memory_order_relaxed)) level = detected;
  }
  return static_cast<Isa>(level);
}

void cap_isa(Isa isa) {
  const Isa detected = detected_isa();
  active.store(static_cast<int>(isa < detected ? isa : detected), std::memory_order_relaxed);
}

}  // namespace xopt
