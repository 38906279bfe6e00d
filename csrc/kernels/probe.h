// What this machine can do at best: the roofs that a kernel's speed is compared with. The contract of the kernels
// "probe" of dtypes f32, bf16 and int8 (multiply-adds out of registers alone) and read (memory, far beyond the caches).
//
// Each level measures the way its GEMM would compute: bf16 below avx512_bf16 goes through fp32 multiply-adds.
#pragma once

#include <cstdint>

namespace xopt {

struct ProbeCall {
  int threads;  // at least 1
  int repeats;  // equal pieces of work to run, at least 1; the fastest counts

  // Filled by the kernel.
  double seconds;           // of the fastest piece
  double work;              // of one piece, all threads: operations (a multiply-add is two) or bytes
  const char* instruction;  // what was measured
};

using ProbeFn = void(ProbeCall&);

}  // namespace xopt
