// Weights in 8 or 4 bits: how they are packed, and how a row of activations is rounded to 8 bits for them.
//
// w = scale * (q - center) - minimum, in groups of neighbours along k (engine/checkpoint/quantized.py). q is unsigned
// here, 0..255, 0..63 or 0..15, so that the products with activations of -127..127 suit the instructions of dots.h; the
// center is taken off through the sum of the activations, which costs no weight memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bytes.h"
#include "dots.h"
#include "interface.h"
#include "lanes.h"
#include "linear.h"
#include "rounding.h"

namespace farsight {

constexpr int kGroupAlignment = 8;  // a group's inputs are filled up to that with zeros: two quads of 4-bit values
constexpr int kSuper = 256;           // inputs of a super-block

// How scales are kept, in as little memory as changes none of them: 16 bits, or codes of 8 bits times a half-precision
// factor of their super-block, as GGUF's K types have them.
enum ScaleType { kFloat, kBf16, kHalf, kCoded };

// How values are multiplied: two of 4 bits in a byte, any of 8 bits, or of 8 bits that dots.h counts as small.
enum ValueType { kNibbles, kBytes, kSmall };

inline float half_to_float(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float sign = x & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  return sign * (exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24));
}

// The half-precision number that equals x; false if none does.
inline bool exact_half(float x, uint16_t* half) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int exponent = int(bits >> 23 & 255) - 127;
  const uint32_t sign = bits >> 16 & 0x8000, fraction = bits & 0x7fffff;
  if (exponent == -127) {
    *half = uint16_t(sign);
    return fraction == 0;
  }
  if (exponent > 15 || exponent < -24) return false;
  const int dropped = exponent >= -14 ? 13 : -1 - exponent;
  const uint32_t whole = 0x800000 | fraction;
  if (whole & ((1u << dropped) - 1)) return false;
  const uint32_t kept = whole >> dropped;
  *half = uint16_t(sign | (exponent >= -14 ? (uint32_t(exponent + 15) << 10 | (kept & 1023)) : kept));
  return true;
}

inline bool exact_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits & 0xffff) == 0;
}

// A vector of scales of 16 bits.
inline f32v load_narrow(ScaleType type, const uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (type == kHalf) return (f32v)_mm512_cvtph_ps(packed);
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (type == kHalf) return (f32v)_mm256_cvtph_ps(packed);
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
#else
  uint16_t raw[kWidth];
  std::memcpy(raw, from, sizeof raw);
  f32v v;
  for (int i = 0; i < kWidth; ++i) v[i] = type == kHalf ? half_to_float(raw[i]) : from_bf16(raw[i]);
  return v;
#endif
}

// A vector of scales; `factors` are those of their super-block, if they are coded.
inline f32v load_scales(ScaleType type, const uint8_t* from, const uint8_t* factors) {
  if (type == kFloat) return load<f32v>(from);
  if (type != kCoded) return load_narrow(type, from);
  i32v codes;
#if defined(__AVX512F__)
  codes = (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  codes = (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  for (int i = 0; i < kWidth; ++i) codes[i] = int8_t(from[i]);
#endif
  return __builtin_convertvector(codes, f32v) * load_narrow(kHalf, factors);
}

// Codes and a half-precision factor whose products are `count` scales; false if there are none.
inline bool find_codes(const float* scales, int count, int8_t* codes, uint16_t* factor) {
  float furthest = 0.0f;
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(scales[i])) return false;
    if (std::fabs(scales[i]) > std::fabs(furthest)) furthest = scales[i];
  }
  std::fill_n(codes, count, int8_t(0));
  *factor = 0;
  if (furthest == 0.0f) return true;
  for (int code_of_furthest = -128; code_of_furthest < 0; ++code_of_furthest) {
    const float each = furthest / float(code_of_furthest);
    if (!exact_half(each, factor)) continue;
    bool fits = true;
    for (int i = 0; fits && i < count; ++i) {
      const float code = std::nearbyint(scales[i] / each);
      fits = code >= -128.0f && code <= 127.0f && code * each == scales[i];
      if (fits) codes[i] = int8_t(code);
    }
    if (fits) return true;
  }
  return false;
}

// Packed weights: panels of kPanel outputs. A panel begins with the factors of its coded scales, if they are coded: for
// each super-block half-precision factors [64], those of the minima [64] if there are any. Then comes a row of blocks, one
// for each group, so that a panel is read in one go:
//   scales [64], minima [64] if there are any, values [quads of k][64][4] bytes, or [pairs of quads][64][4] bytes whose
//   lower halves are the first quad.
struct QuantizedWeights {
  int n = 0, k = 0, bits = 0, group = 0, groups = 0, panels = 0;
  int padded = 0;  // bytes of a group of activations
  int center = 0;
  ValueType value_type = kNibbles;
  ScaleType scale_type = kFloat;
  bool minima = false;
  int super_groups = 1;  // groups of a super-block
  size_t scale_bytes = 0, block_bytes = 0, factor_bytes = 0;  // those of a super-block's factors of one kind
  Bytes bytes;

  explicit QuantizedWeights(const FsQuantized& from);

  size_t super_bytes() const { return factor_bytes * (minima ? 2 : 1); }
  size_t factors_bytes() const { return super_bytes() * (groups / super_groups); }
  size_t panel_bytes() const { return factors_bytes() + block_bytes * groups; }
  void pack_scales(const float* scales, int row, bool of_minima);
  size_t header_bytes() const { return scale_bytes * (minima ? 2 : 1); }
  const uint8_t* panel(int p) const { return bytes.data() + p * panel_bytes(); }
  // A row of activations: values [groups][padded] of 8 bits, or of 16; scales [groups]; their sums [groups].
  bool wide() const { return kPairs && value_type == kBytes; }
  size_t group_bytes() const { return size_t(padded) * (wide() ? 2 : 1); }
  size_t values_bytes() const { return groups * group_bytes(); }
  size_t row_bytes() const { return values_bytes() + size_t(groups) * 8; }
};

// Whether all scales and minima are codes times factors.
inline bool has_codes(const FsQuantized& from) {
  const int count = kSuper / from.group;
  if (kSuper % from.group || count < 2 || from.k % kSuper) return false;
  const size_t supers = size_t(from.n) * (from.k / kSuper);
  std::vector<int8_t> codes(count);
  uint16_t factor;
  for (const float* table : {from.scales, from.minima})
    for (size_t i = 0; table && i < supers; ++i)
      if (!find_codes(table + i * count, count, codes.data(), &factor)) return false;
  return true;
}

inline ScaleType smallest_type(const FsQuantized& from) {
  const size_t count = size_t(from.n) * (from.k / from.group);
  bool bf16 = true, half = true;
  for (const float* table : {from.scales, from.minima}) {
    uint16_t unused;
    for (size_t i = 0; table && i < count && (bf16 || half); ++i) {
      bf16 = bf16 && exact_bf16(table[i]);
      half = half && exact_half(table[i], &unused);
    }
  }
  return bf16 ? kBf16 : half ? kHalf : has_codes(from) ? kCoded : kFloat;
}

inline void put_scale(ScaleType type, uint8_t* table, int column, float x) {
  if (type == kFloat) {
    std::memcpy(table + 4 * column, &x, 4);
    return;
  }
  uint16_t narrow = round_to_bf16(x);
  if (type == kHalf) exact_half(x, &narrow);
  std::memcpy(table + 2 * column, &narrow, 2);
}

// Puts nibbles 0 to 3 of a half-word into the lower halves of four bytes.
inline uint32_t spread_nibbles(uint32_t half) {
  half = (half | half << 8) & 0x00ff00ff;
  return (half | half << 4) & 0x0f0f0f0f;
}

inline void pack_values(const QuantizedWeights& q, const FsQuantized& from, int row, int g, uint8_t* values) {
  const int column = row % kPanel;
  if (q.bits == 4 && q.group % 8 == 0) {  // two quads at a time: value by value, a load takes four times as long
    const uint8_t* stored = static_cast<const uint8_t*>(from.values) + (size_t(row) * q.k + size_t(g) * q.group) / 2;
    for (int i = 0; i < q.group; i += 8, stored += 4) {
      const uint32_t first = stored[0] | uint32_t(stored[1]) << 8, second = stored[2] | uint32_t(stored[3]) << 8;
      const uint32_t quads = spread_nibbles(first) | spread_nibbles(second) << 4;
      std::memcpy(values + (i / 8 * kPanel + column) * 4, &quads, 4);
    }
    return;
  }
  for (int i = 0; i < q.group; ++i) {
    const size_t at = size_t(row) * q.k + size_t(g) * q.group + i;
    if (q.bits == 8) {
      const int value = static_cast<const int8_t*>(from.values)[at] + q.center;
      values[(i / 4 * kPanel + column) * 4 + i % 4] = uint8_t(value);
    } else {
      const int value = static_cast<const uint8_t*>(from.values)[at / 2] >> (at % 2 * 4) & 15;
      values[(i / 8 * kPanel + column) * 4 + i % 4] |= uint8_t(value << (i % 8 / 4 * 4));
    }
  }
}

// The type of the values, and what stands for 0 among them.
inline ValueType find_values(const FsQuantized& from, int* center) {
  *center = from.bits == 8 ? 128 : from.minima ? 0 : 8;
  if (from.bits == 4) return kNibbles;
  if (!kPairs) return kBytes;
  const auto* values = static_cast<const int8_t*>(from.values);
  int8_t lowest = 127, highest = -128;
  for (size_t i = 0; i < size_t(from.n) * from.k; ++i) {
    lowest = std::min(lowest, values[i]);
    highest = std::max(highest, values[i]);
  }
  if (highest - lowest > kLargestSmall) return kBytes;
  *center = -lowest;
  return kSmall;
}

inline QuantizedWeights::QuantizedWeights(const FsQuantized& from)
    : n(from.n), k(from.k), bits(from.bits), group(from.group), groups(k / group), panels((n + kPanel - 1) / kPanel) {
  padded = (group + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  minima = from.minima != nullptr;
  value_type = find_values(from, &center);
  scale_type = smallest_type(from);
  scale_bytes = kPanel * (scale_type == kFloat ? 4 : scale_type == kCoded ? 1 : 2);
  if (scale_type == kCoded) {
    super_groups = kSuper / group;
    factor_bytes = kPanel * 2;
  }
  block_bytes = header_bytes() + size_t(padded) * kPanel * bits / 8;
  bytes.resize(panels * panel_bytes());
  for (int row = 0; row < n; ++row) {
    uint8_t* blocks = bytes.data() + row / kPanel * panel_bytes() + factors_bytes();
    pack_scales(from.scales + size_t(row) * groups, row, false);
    if (minima) pack_scales(from.minima + size_t(row) * groups, row, true);
    for (int g = 0; g < groups; ++g) pack_values(*this, from, row, g, blocks + g * block_bytes + header_bytes());
  }
}

// Puts the scales or minima [groups] of a row into its panel.
inline void QuantizedWeights::pack_scales(const float* scales, int row, bool of_minima) {
  uint8_t* panel = bytes.data() + row / kPanel * panel_bytes();
  uint8_t* tables = panel + factors_bytes() + (of_minima ? scale_bytes : 0);
  const int column = row % kPanel;
  if (scale_type != kCoded) {
    for (int g = 0; g < groups; ++g) put_scale(scale_type, tables + g * block_bytes, column, scales[g]);
    return;
  }
  std::vector<int8_t> codes(super_groups);
  for (int g = 0; g < groups; g += super_groups) {
    uint16_t factor;
    find_codes(scales + g, super_groups, codes.data(), &factor);
    std::memcpy(panel + g / super_groups * super_bytes() + (of_minima ? factor_bytes : 0) + 2 * column, &factor, 2);
    for (int i = 0; i < super_groups; ++i) tables[(g + i) * block_bytes + column] = uint8_t(codes[i]);
  }
}

// Rounds a row of k activations to q's layout.
inline void quantize_row(const QuantizedWeights& q, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<int8_t*>(row);
  auto* scales = reinterpret_cast<float*>(row + q.values_bytes());
  auto* sums = reinterpret_cast<int32_t*>(scales + q.groups);
  for (int g = 0; g < q.groups; ++g) {
    int8_t* to = values + g * q.group_bytes();
    sums[g] = round_group<127>(x + size_t(g) * q.group, q.group, to, scales + g);
    std::memset(to + q.group, 0, q.padded - q.group);
    if (q.wide()) spread_to_words(to, q.padded);
  }
}

}  // namespace farsight
