// The unit of all arithmetic here: a vector of 16 lanes of 32 bits. A lane holds one float32, or two bfloat16 that
// are neighbours along the dimension that is summed over; products are always added up in float32. With that, one
// text of every kernel serves both types. GCC's and Clang's vector types make it portable; where the processor
// multiplies pairs of bfloat16 by itself that is used.
//
// Every result here is one exactly specified sequence of roundings, whatever else is in the step (ADR 27). So the
// compiler may fuse nothing by itself (-ffp-contract=off): a fused multiply-add is written `fma`, and a sum of lanes
// has one order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace farsight {

constexpr int kWidth = 16;

typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef uint32_t u32v __attribute__((vector_size(64)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline f32v splat(float x) { return x - f32v{}; }

// a * b + c: rounded once with AVX-512, elsewhere the product is rounded as well. Compilers have no fused operation on
// vectors of this width, and made of scalars or halves it was three times slower on AVX2 than two operations.
inline f32v fma(f32v a, f32v b, f32v c) {
#ifdef __AVX512F__
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// The sum of all lanes: the upper half is added to the lower one, of that again, down to one lane.
inline float sum(f32v v) {
  alignas(64) float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Up to kWidth values from there on; the lanes behind them are 0.
inline f32v load_first(const float* from, int count) {
  if (count >= kWidth) return load<f32v>(from);
  f32v v = {};
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

inline void store_first(float* to, f32v v, int count) {
  std::memcpy(to, &v, std::min(count, kWidth) * sizeof(float));
}

inline float largest(f32v v) {
  float m = v[0];
  for (int i = 1; i < kWidth; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

inline f32v max(f32v a, f32v b) { return a > b ? a : b; }

// e^x; below -87 it is 0, above 88 it stays what it is there. Polynomial of 2^f (Cephes, exp2f), f within half a unit
// either side of 0; relative error below 3e-7.
inline f32v exp(f32v x) {
  const f32v bounded = max(x, splat(-87.0f));
  const f32v clamped = (bounded < 88.0f ? bounded : splat(88.0f)) * 1.44269504088896341f;
  const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32v whole = (clamped + magic) - magic;
  const f32v f = clamped - whole;
  f32v p = splat(1.535336188319500e-4f);
  for (const float next : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                           6.931472028550421e-1f, 1.0f})
    p = fma(p, f, splat(next));
  const i32v exponent = __builtin_convertvector(whole, i32v) << 23;
  const f32v result = (f32v)((i32v)p + exponent);
  return x < -87.0f ? f32v{} : result;
}

inline float exp(float x) { return exp(splat(x))[0]; }

inline uint16_t round_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

struct F32 {
  typedef float Element;
  static constexpr int kPerLane = 1;

  static float widen(Element x) { return x; }
  static Element narrow(float x) { return x; }

  // acc + a * b, lane by lane; a is one lane for all.
  static f32v fma(f32v acc, uint32_t a, f32v b) {
    float x;
    std::memcpy(&x, &a, sizeof x);
    return farsight::fma(splat(x), b, acc);
  }
};

struct Bf16 {
  typedef uint16_t Element;
  static constexpr int kPerLane = 2;

  static float widen(Element x) { return from_bf16(x); }
  static Element narrow(float x) { return round_to_bf16(x); }

  // The upper neighbour first, then the lower one, as the instruction does it (which takes subnormal numbers for 0).
  static f32v fma(f32v acc, uint32_t a, f32v b) {
#ifdef __AVX512BF16__
    return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
#else
    const u32v bits = (u32v)b;
    const f32v low = (f32v)(bits << 16), high = (f32v)(bits & 0xffff0000u);
    acc = farsight::fma(splat(from_bf16(uint16_t(a >> 16))), high, acc);
    return farsight::fma(splat(from_bf16(uint16_t(a))), low, acc);
#endif
  }
};

// Rounds n values (a whole number of lanes) to T and lays them out in lanes.
template <class T>
inline void pack(const float* __restrict from, int n, uint32_t* to) {
  auto* out = reinterpret_cast<typename T::Element*>(to);
  for (int i = 0; i < n; ++i) out[i] = T::narrow(from[i]);
}

}  // namespace farsight
