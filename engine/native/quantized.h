// Weights in 8 or 4 bits: how they are packed, and how a row of activations is rounded to 8 bits for them.
//
// w = scale * (q - center) - minimum, in groups of neighbours along k (engine/checkpoint/quantized.py). q is unsigned
// here, 0..255 or 0..15, so that the products with activations of -127..127 suit VPDPBUSD; the center is taken off
// through the sum of the activations, which costs no weight memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "interface.h"
#include "lanes.h"
#include "linear.h"
#include "rounding.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace farsight {

constexpr int kGroupAlignment = 8;  // a group's inputs are filled up to that with zeros: two quads of 4-bit values
constexpr size_t kHugePage = 2 << 20;

enum ScaleType { kFloat, kBf16, kHalf };  // how scales are kept: in 16 bits where that changes none of them

// Memory on huge pages, where the system has them: a row reads all weights once, and pages would cost as much.
class Bytes {
 public:
  void resize(size_t size) {
    const size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
    const bool large = size >= kHugePage;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(large ? kHugePage : 64, large ? whole : (size + 63) / 64 * 64)));
    if (size && !data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (large) madvise(data_.get(), whole, MADV_HUGEPAGE);
#endif
    if (size) std::memset(data_.get(), 0, size);
  }
  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t, Free> data_;
};

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

// 16 scales.
inline f32v load_scales(ScaleType type, const uint8_t* from) {
  if (type == kFloat) return load<f32v>(from);
  uint16_t raw[kWidth];
  std::memcpy(raw, from, sizeof raw);
#ifdef __AVX512F__
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (type == kHalf) return (f32v)_mm512_cvtph_ps(packed);
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#else
  f32v v;
  for (int i = 0; i < kWidth; ++i) v[i] = type == kHalf ? half_to_float(raw[i]) : from_bf16(raw[i]);
  return v;
#endif
}

// Packed weights: panels of kPanel outputs; a panel is a row of blocks, one for each group, so that it is read in one go:
//   scales [64], minima [64] if there are any, values [quads of k][64][4] bytes, or [pairs of quads][64][4] bytes whose
//   lower halves are the first quad.
struct QuantizedWeights {
  int n = 0, k = 0, bits = 0, group = 0, groups = 0, panels = 0;
  int padded = 0;  // bytes of a group of activations
  int center = 0;
  ScaleType scale_type = kFloat;
  bool minima = false;
  size_t scale_bytes = 0, block_bytes = 0;
  Bytes bytes;

  explicit QuantizedWeights(const FsQuantized& from);

  size_t panel_bytes() const { return block_bytes * groups; }
  size_t header_bytes() const { return scale_bytes * (minima ? 2 : 1); }
  const uint8_t* panel(int p) const { return bytes.data() + p * panel_bytes(); }
  // A row of activations: values [groups][padded], scales [groups], their sums [groups].
  size_t values_bytes() const { return size_t(groups) * padded; }
  size_t row_bytes() const { return values_bytes() + size_t(groups) * 8; }
};

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
  return bf16 ? kBf16 : half ? kHalf : kFloat;
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

inline void pack_values(const QuantizedWeights& q, const FsQuantized& from, int row, int g, uint8_t* values) {
  const int column = row % kPanel;
  for (int i = 0; i < q.group; ++i) {
    const size_t at = size_t(row) * q.k + size_t(g) * q.group + i;
    if (q.bits == 8) {
      const int value = static_cast<const int8_t*>(from.values)[at] + 128;
      values[(i / 4 * kPanel + column) * 4 + i % 4] = uint8_t(value);
    } else {
      const int value = static_cast<const uint8_t*>(from.values)[at / 2] >> (at % 2 * 4) & 15;
      values[(i / 8 * kPanel + column) * 4 + i % 4] |= uint8_t(value << (i % 8 / 4 * 4));
    }
  }
}

inline QuantizedWeights::QuantizedWeights(const FsQuantized& from)
    : n(from.n), k(from.k), bits(from.bits), group(from.group), groups(k / group), panels((n + kPanel - 1) / kPanel) {
  padded = (group + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
  minima = from.minima != nullptr;
  center = bits == 8 ? 128 : minima ? 0 : 8;
  scale_type = smallest_type(from);
  scale_bytes = kPanel * (scale_type == kFloat ? 4 : 2);
  block_bytes = header_bytes() + size_t(padded) * kPanel * bits / 8;
  bytes.resize(panels * panel_bytes());
  for (int row = 0; row < n; ++row) {
    for (int g = 0; g < groups; ++g) {
      uint8_t* block = bytes.data() + row / kPanel * panel_bytes() + g * block_bytes;
      const size_t at = size_t(row) * groups + g;
      put_scale(scale_type, block, row % kPanel, from.scales[at]);
      if (minima) put_scale(scale_type, block + scale_bytes, row % kPanel, from.minima[at]);
      pack_values(*this, from, row, g, block + header_bytes());
    }
  }
}

// Rounds a row of k activations to q's layout.
inline void quantize_row(const QuantizedWeights& q, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<int8_t*>(row);
  auto* scales = reinterpret_cast<float*>(row + q.values_bytes());
  auto* sums = reinterpret_cast<int32_t*>(scales + q.groups);
  for (int g = 0; g < q.groups; ++g) {
    int8_t* to = values + size_t(g) * q.padded;
    sums[g] = round_group<127>(x + size_t(g) * q.group, q.group, to, scales + g);
    std::memset(to + q.group, 0, q.padded - q.group);
  }
}

}  // namespace farsight
