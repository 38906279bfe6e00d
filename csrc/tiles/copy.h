// Copies of short runs of bytes, inline: a call to memcpy would cost as much as the copy.
#pragma once

#include "tiles/vector.h"

namespace xopt::XOPT_ISA {

// Of kPiece bytes or more. The last piece overlaps the one before.
template <int64_t kPiece>
XOPT_INLINE void copy_pieces(const uint8_t* from, int64_t bytes, uint8_t* to) {
  for (int64_t i = 0; i + kPiece < bytes; i += kPiece) __builtin_memcpy(to + i, from + i, kPiece);
  __builtin_memcpy(to + bytes - kPiece, from + bytes - kPiece, kPiece);
}

// In pieces of 32 bytes at most, at every level: where memory is what is waited for, wider ones gain nothing.
XOPT_INLINE void copy_short(const uint8_t* from, int64_t bytes, uint8_t* to) {
  if (bytes >= 32) return copy_pieces<32>(from, bytes, to);
  if (bytes >= 16) return copy_pieces<16>(from, bytes, to);
  if (bytes >= 8) return copy_pieces<8>(from, bytes, to);
  if (bytes >= 4) return copy_pieces<4>(from, bytes, to);
  for (int64_t i = 0; i < bytes; ++i) to[i] = from[i];
}

// In pieces as wide as the level has them.
XOPT_INLINE void copy_bytes(const void* from, int64_t bytes, void* to) {
  const auto* source = static_cast<const uint8_t*>(from);
  auto* target = static_cast<uint8_t*>(to);
#if XOPT_LEVEL >= XOPT_LEVEL_AVX512
  for (; bytes >= 64; bytes -= 64, source += 64, target += 64) {
    _mm512_storeu_si512(target, _mm512_loadu_si512(source));
  }
  const __mmask64 rest = (uint64_t{1} << bytes) - 1;
  _mm512_mask_storeu_epi8(target, rest, _mm512_maskz_loadu_epi8(rest, source));
#else
  copy_short(source, bytes, target);
#endif
}

}  // namespace xopt::XOPT_ISA
