// The unit of all arithmetic in this directory: a vector of `kWidth` lanes of 32 bits, as wide as the processor's
// registers. A lane holds one float32, or two bfloat16 that are neighbours along the summed dimension; products are always
// added in float32. One source text of each kernel therefore serves both types and every width. The vector types of GCC
// and Clang make it portable; on AMD's processors with AVX512-BF16, one instruction multiplies the pairs.
//
// Every result is one exactly specified sequence of roundings, whatever else is in the step (ADR 27). The compiler
// must not fuse operations by itself (-ffp-contract=off): fused multiply-adds are written `fma`, and a sum of lanes has
// one order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace farsight {

// Never wider than a register: compilers keep such vectors in memory, and a product of matrices is ten times slower.
#if defined(__AVX512F__)
constexpr int kWidth = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif

typedef float f32v __attribute__((vector_size(4 * kWidth)));
typedef int32_t i32v __attribute__((vector_size(4 * kWidth)));
typedef uint32_t u32v __attribute__((vector_size(4 * kWidth)));

// How many vectors of each of `rows` rows of sums are computed together: `most` (a power of two), or as many as leave two
// registers for what is added.
constexpr int vectors_together(int rows, int most) {
  while (most > 1 && rows * most + 2 > kRegisters) most /= 2;
  return most;
}

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

// Brings a line into the second-level cache. Into the first level, it would take one of the few places for misses until it
// comes, which halves the rate.
inline void read_ahead(const void* from) { __builtin_prefetch(from, 0, 2); }

// a * b + c. With AVX-512 or FMA the result is rounded once; elsewhere the product is rounded, then the sum.
inline f32v fma(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The sum of all lanes: the upper half is added to the lower half, then again within that half, down to one lane.
inline float sum(f32v v) {
  alignas(64) float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Loads min(count, kWidth) values; the other lanes are 0.
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

// e^x; 0 below -87, and e^88 above 88. A polynomial of 2^f (Cephes, exp2f) with f in -0.5 .. 0.5; the relative error is
// below 3e-7.
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

inline f32v tanh(f32v x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

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

  static constexpr int kSteps = 1;
  static f32v part(int, f32v lanes) { return lanes; }
  static f32v fma(f32v acc, uint32_t a, f32v b) { return farsight::fma((f32v)(a - u32v{}), b, acc); }
};

struct Bf16 {
  typedef uint16_t Element;
  static constexpr int kPerLane = 2;

  static float widen(Element x) { return from_bf16(x); }
  static Element narrow(float x) { return round_to_bf16(x); }

  // The product of the upper neighbours is added first, as the instruction does (which takes subnormal numbers for 0).
  // Intel's processors, those with AMX, need longer for it than for two multiply-adds.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  static constexpr int kSteps = 1;
  static f32v part(int, f32v lanes) { return lanes; }
  static f32v fma(f32v acc, uint32_t a, f32v b) {
    return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
  }
#else
  static constexpr int kSteps = 2;
  static f32v part(int step, f32v lanes) {
    const u32v bits = (u32v)lanes;
    return (f32v)(step == 0 ? bits & 0xffff0000u : bits << 16);
  }
  static f32v fma(f32v acc, uint32_t a, f32v b) { return farsight::fma((f32v)(a - u32v{}), b, acc); }
#endif
};

// Adds to acc[r][v] the product of vector v at `from`, of which only the first is there unless they are `whole`, and an
// input that all its lanes share. input(r) points to its words, one for each step. A step goes through all rows before the
// next one; `Apart` keeps compilers from mixing the steps, for tiles whose sums would no longer fit the registers.
template <class T, bool Apart, int R, int V, class Input>
inline void add_products(f32v (&acc)[R][V], const uint32_t* from, const Input& input, bool whole = true) {
#pragma GCC unroll 2
  for (int step = 0; step < T::kSteps; ++step) {
    f32v vectors[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
      vectors[v] = v == 0 || whole ? T::part(step, load<f32v>(from + v * kWidth)) : f32v{};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint32_t x = input(r)[step];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] = T::fma(acc[r][v], x, vectors[v]);
    }
    if (Apart && T::kSteps > 1) __asm__ volatile("" ::: "memory");
  }
}

// Rounds n values to T and stores them in lanes; n is a multiple of T::kPerLane.
template <class T>
inline void pack(const float* __restrict from, int n, uint32_t* to) {
  auto* out = reinterpret_cast<typename T::Element*>(to);
  for (int i = 0; i < n; ++i) out[i] = T::narrow(from[i]);
}

// Words of n inputs as `add_products` takes them.
template <class T>
constexpr int input_words(int n) {
  return (n + T::kPerLane - 1) / T::kPerLane * T::kSteps;
}

// Rounds n values to T and stores them as inputs: as lanes, or where a lane takes two steps, as two float32,
// of which the upper neighbour is the first.
template <class T>
inline void pack_inputs(const float* __restrict from, int n, uint32_t* __restrict to) {
  if (T::kSteps == T::kPerLane) {
    auto* out = reinterpret_cast<float*>(to);
    for (int i = 0; i + T::kSteps <= n; i += T::kSteps)
      for (int step = 0; step < T::kSteps; ++step) out[i + step] = T::widen(T::narrow(from[i + T::kSteps - 1 - step]));
    if (n % T::kSteps) out[n - 1] = 0.0f, out[n] = T::widen(T::narrow(from[n - 1]));
  } else {
    pack<T>(from, n, to);
  }
}

}  // namespace farsight
