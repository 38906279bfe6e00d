// Which level this source is being compiled for (see csrc/README.md). Everything in tiles/ and kernels/ that depends
// on it stands in namespace xopt::XOPT_ISA, so that code of two levels can never be merged by the linker.
#pragma once

#if !defined(XOPT_ISA) || !defined(XOPT_LEVEL)
#error "tiles are compiled once per ISA level: XOPT_ISA and XOPT_LEVEL come from the build"
#endif

#define XOPT_LEVEL_SCALAR 0
#define XOPT_LEVEL_AVX2 1
#define XOPT_LEVEL_AVX512 2
#define XOPT_LEVEL_AVX512_VNNI 3
#define XOPT_LEVEL_AVX512_BF16 4
#define XOPT_LEVEL_AMX 5

// Sanitizer builds check what a function does, not how fast; forced inlining there is most of their compile time.
#if defined(__SANITIZE_ADDRESS__)
#define XOPT_INLINE inline
#else
#define XOPT_INLINE inline __attribute__((always_inline))
#endif
