// How floats are rounded to integers with one scale: activations, and keys, values, queries and softmax weights of a KV
// pool in 8 bits.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace farsight {

// Neither has an order that matters.
inline float largest_lane(f32v v) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)v);
#else
  return largest(v);
#endif
}

inline int32_t sum_lanes(i32v v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += v[i];
  return sum;
#endif
}

// Stores the first `count` of a vector of integers that fit Int.
template <class Int>
inline void store_narrow(i32v whole, Int* to, int count) {
  alignas(64) Int narrow[kWidth];
#ifdef __AVX512F__
  if (sizeof(Int) == 1)
    _mm_store_si128(reinterpret_cast<__m128i*>(narrow), _mm512_cvtepi32_epi8((__m512i)whole));
  else
    _mm256_store_si256(reinterpret_cast<__m256i*>(narrow), _mm512_cvtepi32_epi16((__m512i)whole));
#else
  for (int i = 0; i < kWidth; ++i) narrow[i] = Int(whole[i]);
#endif
  std::memcpy(to, narrow, std::min(kWidth, count) * sizeof(Int));
}

// Rounds `count` floats that share a scale: scale = largest / Most, values x * (Most / largest) to nearest, ties to
// even. Below 1e-30 all become 0. A value that is not finite makes the scale NaN: what is computed with it must tell.
// Returns the sum of the values.
template <int Most, class Int>
inline int32_t round_group(const float* x, int count, Int* values, float* scale) {
  f32v top = {};
  i32v lacks = {};
  for (int i = 0; i < count; i += kWidth) {
    const f32v v = load_first(x + i, count - i);
    const f32v size = v < 0.0f ? -v : v;
    lacks |= v != v;
    top = max(top, size);
  }
  const float highest = largest_lane(top);
  const bool lost = sum_lanes(lacks) != 0 || !(highest <= std::numeric_limits<float>::max());
  *scale = lost ? std::numeric_limits<float>::quiet_NaN() : highest < 1e-30f ? 0.0f : highest / float(Most);
  if (lost) {
    std::fill_n(values, count, Int(0));
    return 0;
  }
  const float factor = highest < 1e-30f ? 0.0f : float(Most) / highest;
  const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
  const i32v magic_bits = (i32v)magic;
  i32v total = {};
  for (int i = 0; i < count; i += kWidth) {
    const i32v whole = (i32v)(load_first(x + i, count - i) * factor + magic) - magic_bits;
    total += whole;
    store_narrow(whole, values + i, count - i);
  }
  return sum_lanes(total);
}

}  // namespace farsight
