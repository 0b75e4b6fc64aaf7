// Exact sums of products of bytes, in the instructions that the processor has.
//
// VPDPBUSD (VNNI) adds four products of an unsigned and a signed byte to a lane of 32 bits. Without it, VPMADDUBSW adds up
// two such products in 16 bits, where large ones would saturate: weights of up to 4 bits stay below the limit for
// kNibbleQuads products of a lane, those of up to 6 bits for kSmallQuads. Weights of 8 bits go by VPMADDWD, with activations
// that lie in 16 bits already (kPairs). Everything else is plain C++.
#pragma once

#include "lanes.h"

#ifdef __SSSE3__
#include <immintrin.h>
#endif

namespace farsight {

constexpr int kLargestSmall = 63;  // of weights that count as small
constexpr int kNibbleQuads = 8;    // 8 * 2 * 15 * 127 and 2 * 2 * 63 * 127 fit int16
constexpr int kSmallQuads = 2;

typedef int16_t i16v __attribute__((vector_size(4 * kWidth)));
typedef uint16_t u16v __attribute__((vector_size(4 * kWidth)));

#if defined(__AVX512VNNI__)
#define FARSIGHT_DOT4(acc, w, x) _mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x))
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define FARSIGHT_DOT4(acc, w, x) _mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x))
#elif defined(__AVX512BW__)
#define FARSIGHT_WORDS(a, b) _mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#define FARSIGHT_BYTES(a, b) _mm512_maddubs_epi16((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define FARSIGHT_WORDS(a, b) _mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#define FARSIGHT_BYTES(a, b) _mm256_maddubs_epi16((__m256i)(a), (__m256i)(b))
#elif defined(__SSSE3__) && !defined(__AVX512F__)
#define FARSIGHT_WORDS(a, b) _mm_madd_epi16((__m128i)(a), (__m128i)(b))
#define FARSIGHT_BYTES(a, b) _mm_maddubs_epi16((__m128i)(a), (__m128i)(b))
#endif

inline i32v splat_int(int32_t x) { return x - i32v{}; }

// acc + the products of 4 unsigned bytes of w and 4 signed bytes of x, lane by lane; x is the same for all lanes.
inline i32v dot4(i32v acc, u32v w, int32_t x) {
#ifdef FARSIGHT_DOT4
  return (i32v)FARSIGHT_DOT4(acc, w, x);
#else
  acc += (i32v)(w & 255) * int32_t(int8_t(x));
  acc += (i32v)(w >> 8 & 255) * int32_t(int8_t(x >> 8));
  acc += (i32v)(w >> 16 & 255) * int32_t(int8_t(x >> 16));
  return acc + (i32v)(w >> 24) * (x >> 24);
#endif
}

#ifdef FARSIGHT_WORDS
constexpr bool kPairs = true;

// Has a sum computed here. Compilers would add products to each other first, for which there are no registers.
template <class Vector>
inline void settle(Vector& sum) {
#ifdef __AVX512F__
  __asm__("" : "+v"(sum));
#else
  __asm__("" : "+x"(sum));
#endif
}

// The sums of two products of 16 bits, lane by lane.
inline i32v mul_words(i32v a, i32v b) { return (i32v)FARSIGHT_WORDS(a, b); }

// The sums of two products of an unsigned byte of w and a signed byte of x, in 16 bits.
inline i16v mul_bytes(u32v w, i32v x) { return (i16v)FARSIGHT_BYTES(w, x); }

// Each lane's two sums of 16 bits together.
inline i32v widen(i16v sums) { return mul_words((i32v)sums, splat_int(0x00010001)); }
#else
constexpr bool kPairs = false;
#endif

// Spreads n signed bytes at `x`, a multiple of 4, over 2 * n bytes there: of each quad first values 0 and 2, then 1 and 3.
inline void spread_to_words(int8_t* x, int n) {
  for (int i = n - 4; i >= 0; i -= 4) {
    const int16_t words[4] = {x[i], x[i + 2], x[i + 1], x[i + 3]};
    std::memcpy(x + 2 * i, words, sizeof words);
  }
}

}  // namespace farsight
