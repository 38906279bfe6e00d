// Eight neighbouring outputs of a depthwise convolution of bf16, 32 channels at a time.
//
// A load brings 32 channels, and to put zeros between them takes one instruction for each half: of every 128 bits the lower
// four channels are in the one, the upper four in the other. Weights lie in that order, and so do sums until both halves
// become bf16 by one instruction, which takes as long as for one of them. Where bf16 is multiplied in pairs at the speed of
// floats (AMD), two lines of the kernel are one instruction.
#pragma once

#include "kernels/depthwise_sums.h"

#if XOPT_LEVEL >= XOPT_LEVEL_AVX512

namespace xopt::XOPT_ISA {

inline constexpr int64_t kTwoVectors = 2 * kWidth;

XOPT_INLINE __m512i load_words(const Bf16* p) { return _mm512_loadu_si512(p); }
XOPT_INLINE F low_half(__m512i words) {
  return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), words));
}
XOPT_INLINE F high_half(__m512i words) {
  return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), words));
}

// Lanes of two vectors, those of the second from 16 on, in two others.
XOPT_INLINE void rearrange(__m512i to_first, __m512i to_second, F& first, F& second) {
  const F rearranged = _mm512_permutex2var_ps(first, to_first, second);
  second = _mm512_permutex2var_ps(first, to_second, second);
  first = rearranged;
}
// Two vectors of channels in their order, as halves.
XOPT_INLINE void to_halves(F& first, F& second) {
  const __m512i low = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
  rearrange(low, _mm512_add_epi32(low, _mm512_set1_epi32(4)), first, second);
}
// The other way round.
XOPT_INLINE void to_order(F& low, F& high) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  rearrange(first, _mm512_add_epi32(first, _mm512_set1_epi32(8)), low, high);
}

// What 32 channels have, 16 and as many `step` elements on, becomes what halves have.
inline void to_halves(float* values, int64_t step, int64_t positions) {
  for (int64_t position = 0; position < positions; ++position, values += kTileColumns) {
    F first = load(values), second = load(values + step);
    to_halves(first, second);
    store(values, first);
    store(values + step, second);
  }
}

// As add_line.
template <int64_t K, int64_t S, bool Checked>
XOPT_INLINE void add_line_halves(const Bf16* x, int64_t pitch, uint32_t inside, const float* weights, int64_t step,
                                 F (&low)[kOutputs], F (&high)[kOutputs]) {
  F low_weight[K], high_weight[K];
#pragma GCC unroll 8
  for (int64_t p = 0; p < K; ++p) {
    low_weight[p] = load(weights + p * kTileColumns);
    high_weight[p] = load(weights + step + p * kTileColumns);
  }
#pragma GCC unroll 32
  for (int64_t i = 0; i < kPositions<K, S>; ++i, x += pitch) {
    asm("" : "+r"(x));
    asm("" : "+r"(inside));
    if (Checked && (inside >> i & 1) == 0) continue;
    const __m512i words = load_words(x);
    const F low_value = low_half(words), high_value = high_half(words);
#pragma GCC unroll 8
    for (int64_t p = 0; p < K; ++p) {
      const int64_t r = (i - p) / S;
      if (i < p || r * S != i - p || r >= kOutputs) continue;
      low[r] = fma(low_value, low_weight[p], low[r]);
      high[r] = fma(high_value, high_weight[p], high[r]);
    }
  }
}

#if XOPT_LINES_IN_PAIRS
// Intel, whose CPUs with AMX are at a level of their own, takes four times as long for a product of pairs as for one of
// floats.
XOPT_INLINE F add_pairs(F sum, __m512i pairs, __m512i weights) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pairs), reinterpret_cast<__m512bh>(weights));
}
// Of weights that are bf16, as floats.
XOPT_INLINE __m512i weight_pairs(const float* first, const float* second) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_loadu_si512(first), 16), _mm512_loadu_si512(second));
}

// Two lines of the kernel.
template <int64_t K, int64_t S, bool Checked>
XOPT_INLINE void add_two_lines(const KernelLine<Bf16>* lines, int64_t value, int64_t weight, int64_t pitch,
                               uint32_t inside, int64_t step, F (&low)[kOutputs], F (&high)[kOutputs]) {
  __m512i low_weight[K], high_weight[K];
#pragma GCC unroll 8
  for (int64_t p = 0; p < K; ++p) {
    const int64_t at = weight + p * kTileColumns;
    low_weight[p] = weight_pairs(lines[0].weights + at, lines[1].weights + at);
    high_weight[p] = weight_pairs(lines[0].weights + at + step, lines[1].weights + at + step);
  }
  const Bf16 *x = lines[0].values + value, *y = lines[1].values + value;
#pragma GCC unroll 32
  for (int64_t i = 0; i < kPositions<K, S>; ++i, x += pitch, y += pitch) {
    asm("" : "+r"(x), "+r"(y));
    asm("" : "+r"(inside));
    if (Checked && (inside >> i & 1) == 0) continue;
    const __m512i above = load_words(x), below = load_words(y);
    const __m512i low_pairs = _mm512_unpacklo_epi16(above, below), high_pairs = _mm512_unpackhi_epi16(above, below);
#pragma GCC unroll 8
    for (int64_t p = 0; p < K; ++p) {
      const int64_t r = (i - p) / S;
      if (i < p || r * S != i - p || r >= kOutputs) continue;
      low[r] = add_pairs(low[r], low_pairs, low_weight[p]);
      high[r] = add_pairs(high[r], high_pairs, high_weight[p]);
    }
  }
}
#endif

// As sum_outputs, of the 32 channels from c on.
template <int64_t K, int64_t S, bool Folds>
XOPT_INLINE void sum_halves(const OutputsCall<Bf16>& call, const EightOutputs<Bf16>& outputs, int64_t c,
                            F (&low)[kOutputs], F (&high)[kOutputs]) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r) low[r] = high[r] = set1(0.0F);
  if constexpr (Folds) {
    begin_with(load(call.starts + c), low);
    begin_with(load(call.starts + c + kWidth), high);
  }
  const int64_t x = outputs.values + c, weight = c / kTileColumns * call.weight_step, step = call.weight_step;
  const bool all_inside = outputs.inside == (uint64_t{1} << kPositions<K, S>)-1;
  const KernelLine<Bf16>*line = call.lines, *end = call.lines + call.line_count;
#if XOPT_LINES_IN_PAIRS
  for (; line + 1 < end; line += 2) {
    if (all_inside) {
      add_two_lines<K, S, false>(line, x, weight, call.pitch, 0, step, low, high);
    } else {
      add_two_lines<K, S, true>(line, x, weight, call.pitch, outputs.inside, step, low, high);
    }
  }
#endif
  for (; line < end; ++line) {
    if (all_inside) {
      add_line_halves<K, S, false>(line->values + x, call.pitch, 0, line->weights + weight, step, low, high);
    } else {
      add_line_halves<K, S, true>(line->values + x, call.pitch, outputs.inside, line->weights + weight, step, low,
                                  high);
    }
  }
}

// Hides what a pointer points to, so that it is fetched where it is wanted: GCC would keep it in registers all along, and
// sums on the stack for it.
template <class T>
XOPT_INLINE const T* hidden(const T* p) {
  asm("" : "+r"(p));
  return p;
}

alignas(64) inline constexpr int64_t kEighthsInOrder[] = {0, 4, 1, 5, 2, 6, 3, 7};

// Finished sums of `rows` outputs, where nothing is added to them.
XOPT_INLINE void finish_halves(const Finish<Bf16>& f, int64_t rows, int64_t column, F (&low)[kOutputs],
                               F (&high)[kOutputs]) {
  F low_bias = set1(0.0F), high_bias = low_bias, low_scale = set1(1.0F), high_scale = low_scale;
  if constexpr (!kFolds<Bf16>) {
    low_bias = load(f.bias + column);
    high_bias = load(f.bias + column + kWidth);
    to_halves(low_bias, high_bias);
    if (f.scale != nullptr) {
      low_scale = load(f.scale + column);
      high_scale = load(f.scale + column + kWidth);
      to_halves(low_scale, high_scale);
    }
  }
  const Finish<Bf16>* limits = hidden(&f);
  const F least = set1(limits->low), most = set1(limits->high);
  const __m512i order = _mm512_load_si512(hidden(kEighthsInOrder));
  const int64_t count = f.columns - column;
  const __mmask32 mask = count >= kTwoVectors ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  Bf16* out = f.out + column;
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r, out += f.out_stride) {
    asm("" : "+r"(out));
    F x = low[r], y = high[r];
    if constexpr (!kFolds<Bf16>) {
      x = fma(x, low_scale, low_bias);
      y = fma(y, high_scale, high_bias);
    }
    if (f.clamps) {
      x = min(most, max(least, x));
      y = min(most, max(least, y));
    }
    const __m512i words = _mm512_permutexvar_epi64(order, to_words(x, y));
    if (r < rows) _mm512_mask_storeu_epi16(out, mask, words);
  }
}

// Where something is.
XOPT_INLINE void finish_in_order(const Finish<Bf16>& f, int64_t rows, int64_t column, F (&low)[kOutputs],
                                 F (&high)[kOutputs]) {
#pragma GCC unroll 8
  for (int64_t r = 0; r < kOutputs; ++r) to_order(low[r], high[r]);
  finish_rarely<!kFolds<Bf16>>(f, rows, column, low);
  finish_rarely<!kFolds<Bf16>>(f, rows, column + kWidth, high);
}

// Sums for an epilogue of its own.
template <int64_t K, int64_t S>
void store_halves(const OutputsCall<Bf16>& call) {
  for (int64_t w = 0; w < call.outputs; w += kOutputs) {
    const int64_t first = first_of_eight(w, call.outputs);
    const EightOutputs<Bf16> outputs(call, first, kPositions<K, S>);
    for (int64_t c = 0; c < call.columns; c += kTwoVectors) {
      float* sums = call.sums + c / kPanelColumns * call.panel_step + first * kPanelColumns;
      F low[kOutputs], high[kOutputs];
      if (c + kWidth >= call.columns) {
        sum_outputs<K, S, false>(call, outputs, c, low);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kOutputs; ++r) store(sums + r * kPanelColumns, low[r]);
        continue;
      }
      sum_halves<K, S, false>(call, outputs, c, low, high);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kOutputs; ++r) {
        to_order(low[r], high[r]);
        store(sums + r * kPanelColumns, low[r]);
        store(sums + r * kPanelColumns + kWidth, high[r]);
      }
    }
  }
}

template <int64_t K, int64_t S>
void finish_outputs_halves(const OutputsCall<Bf16>& call) {
  Finish<Bf16> finish = finish_of<Bf16>(*call.epilogue, *call.strip, call.row, call.row, 0);
  Bf16* const out = finish.out;
  const Bf16* const other = finish.other;
  const int64_t rows = minimum(call.outputs, kOutputs);
  for (int64_t w = 0; w < call.outputs; w += kOutputs) {
    const int64_t first = first_of_eight(w, call.outputs);
    const EightOutputs<Bf16> outputs(call, first, kPositions<K, S>);
    finish.out = out + first * finish.out_stride;
    if (other != nullptr) finish.other = other + first * finish.other_stride;
    for (int64_t c = 0; c < call.columns; c += kTwoVectors) {
      F low[kOutputs], high[kOutputs];
      if (c + kWidth >= call.columns) {  // of one vector
        sum_outputs<K, S, kFolds<Bf16>>(call, outputs, c, low);
        finish_rarely<!kFolds<Bf16>>(finish, rows, c, low);
        continue;
      }
      sum_halves<K, S, kFolds<Bf16>>(call, outputs, c, low, high);
      if (finish.other == nullptr) {
        finish_halves(finish, rows, c, low, high);
      } else {
        finish_in_order(finish, rows, c, low, high);
      }
    }
  }
}

// nullptr where the kernel is none of those known.
inline OutputsFn<Bf16>* select_halves(const PatchesView& v, bool finish) {
  return select_line(v, [&](auto k, auto s) -> OutputsFn<Bf16>* {
    if constexpr (k == 0) {
      return nullptr;
    } else {
      return finish ? finish_outputs_halves<k, s> : store_halves<k, s>;
    }
  });
}

}  // namespace xopt::XOPT_ISA

#endif
