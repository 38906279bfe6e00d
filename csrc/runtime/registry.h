// The kernels that this build holds: (name, dtype, level) -> function.
//
// A kernel source registers itself at load time, once per level it is compiled for; there is no central list.
// Records live in static storage and form an intrusive list, so kernel sources need no STL container.
#pragma once

#include <atomic>
#include <cstdint>

#include "runtime/cpu.h"

namespace xopt {

using KernelFn = void (*)();

struct KernelRecord {
  // Defined out of line: it runs at load time, on whatever CPU, and so must not be compiled for the record's level.
  KernelRecord(const char* name, const char* dtype, Isa isa, KernelFn fn);
  // A kernel of another device, in a list of that device's own.
  KernelRecord(const char* name, const char* dtype, KernelFn fn, KernelRecord** list);

  const char* name;
  const char* dtype;
  Isa isa;
  KernelFn fn;
  std::atomic<int64_t> calls;  // how often it was run: tests prove by it that a level was really taken
  KernelRecord* next;
};

// Head of the list of all records, in no particular order.
KernelRecord* first_kernel();

// The record of the highest level up to active_isa(), or to a lower limit; throws std::runtime_error naming what is missing.
KernelRecord* find_kernel(const char* name, const char* dtype);
KernelRecord* find_kernel(const char* name, const char* dtype, Isa limit);

// Another device that runs kernels in place of the CPU. It is a thread's own choice, so that others are not concerned.
class Offload {
 public:
  virtual KernelRecord* find(const char* name, const char* dtype) = 0;  // nullptr: the CPU's is run
  // Whether operators return before their kernels have run. What those read and write is then handed to `hold`, which
  // drops it once they have, and the host waits before it reads anything itself.
  virtual bool is_asynchronous() const = 0;
  virtual void hold(void* object, void (*drop)(void*)) = 0;
  virtual void wait() = 0;

 protected:
  ~Offload() = default;
};
Offload* current_offload();
void set_current_offload(Offload* offload);  // nullptr: none

// A use of a kernel: looked up at its first call and again when the cap has changed.
template <class Fn>
class Kernel {
 public:
  constexpr Kernel(const char* name, const char* dtype) : name_(name), dtype_(dtype) {}

  const char* name() const { return name_; }
  const char* dtype() const { return dtype_; }

  // Always inline: a copy of its own, made for AVX-512, would be the linker's to serve to all levels.
  template <class... Args>
  [[gnu::always_inline]] inline void operator()(Args&&... args) {
    if (Offload* offload = current_offload()) {
      if (KernelRecord* taken = offload->find(name_, dtype_)) return run(taken, static_cast<Args&&>(args)...);
    }
    KernelRecord* record = record_.load(std::memory_order_acquire);
    if (record == nullptr || level_.load(std::memory_order_relaxed) != static_cast<int>(active_isa())) {
      record = find_kernel(name_, dtype_);
      level_.store(static_cast<int>(active_isa()), std::memory_order_relaxed);
      record_.store(record, std::memory_order_release);
    }
    run(record, static_cast<Args&&>(args)...);
  }

  // The record of a lower level, which is looked for anew in each call.
  template <class... Args>
  void run_up_to(Isa limit, Args&&... args) const {
    run(find_kernel(name_, dtype_, limit), static_cast<Args&&>(args)...);
  }

 private:
  template <class... Args>
  [[gnu::always_inline]] static inline void run(KernelRecord* record, Args&&... args) {
    record->calls.fetch_add(1, std::memory_order_relaxed);
    reinterpret_cast<Fn*>(record->fn)(static_cast<Args&&>(args)...);
  }

  const char* name_;
  const char* dtype_;
  std::atomic<KernelRecord*> record_{nullptr};
  std::atomic<int> level_{-1};
};

}  // namespace xopt

// In a kernel source, inside namespace xopt::XOPT_ISA: XOPT_REGISTER_KERNEL(gemm, bf16, gemm_bf16);
#define XOPT_REGISTER_KERNEL(NAME, DTYPE, FN)                                               \
  static ::xopt::KernelRecord NAME##_##DTYPE##_record(#NAME, #DTYPE, ::xopt::Isa::XOPT_ISA, \
                                                      reinterpret_cast<::xopt::KernelFn>(&(FN)))
