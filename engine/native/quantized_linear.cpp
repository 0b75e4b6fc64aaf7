// Matrix products of activations in 8 bits with weights in 8 or 4 bits (quantized.h), into float32.
//
// Each output is exactly specified (ADR 42): for each group, in ascending order, the integer
//   I = sum of q * x over the group - center * sum of x,            exact in 32 bits
// and then  out = fma(float(I) * scale of x, scale of w, out), and with minima
//           out = fma(-(scale of x * float(sum of x)), minimum of w, out).
// Then the bias is added, then what the output is added to. Integer sums have no order, so every instruction set
// gives the same I; the float part does not depend on tiles, rows or threads.
#include <vector>

#include "parts.h"
#include "quantized.h"

namespace farsight {

// Rows of a tile of 4-bit weights. Their groups are small: with more rows, what the registers do not hold of the float sums
// comes and goes with each group, which costs more than to unpack the weights again for the next tile.
constexpr int kMaxRowsOf4Bits = 4;

// acc + the products of 4 unsigned bytes of w and 4 signed bytes of x, lane by lane; x is the same for all lanes.
// VPMADDUBSW would be shorter without VNNI, but it saturates.
inline i32v dot4(i32v acc, u32v w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (i32v)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i b = _mm256_set1_epi32(x), whole = (__m256i)w;
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b_odd = _mm256_srai_epi16(b, 8);
  const __m256i even = _mm256_and_si256(whole, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(whole, 8);
  return acc + (i32v)_mm256_add_epi32(_mm256_madd_epi16(even, b_even), _mm256_madd_epi16(odd, b_odd));
#else
  acc += (i32v)(w & 255) * int32_t(int8_t(x));
  acc += (i32v)(w >> 8 & 255) * int32_t(int8_t(x >> 8));
  acc += (i32v)(w >> 16 & 255) * int32_t(int8_t(x >> 16));
  return acc + (i32v)(w >> 24) * (x >> 24);
#endif
}

inline int32_t quad(const uint8_t* from) {
  int32_t x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Adds up the products of a group for R rows and a panel; `values` is the block's, `x` the group's of the first row.
template <int Bits, int R>
inline void group_sums(const uint8_t* values, int padded, const uint8_t* x, size_t stride, const Ahead& ahead,
                       i32v (&sums)[R][kVectors]) {
  constexpr int V = vectors_together(R, kVectors), kInputs = Bits == 8 ? 4 : 8;
  for (int j = 0; j < kVectors; j += V) {
    const uint8_t* from = values + 4 * kWidth * j;
    i32v acc[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = sums[r][j + v];
    for (int k = 0; k < padded; k += kInputs, from += 4 * kPanel) {
      if (j == 0) ahead.step(from);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const u32v both = load<u32v>(from + 4 * kWidth * v);
        const u32v first = Bits == 8 ? both : both & 0x0f0f0f0fu, second = both >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          acc[r][v] = dot4(acc[r][v], first, quad(x + r * stride + k));
          if (Bits == 4) acc[r][v] = dot4(acc[r][v], second, quad(x + r * stride + k + 4));
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][j + v] = acc[r][v];
  }
}

// R rows, `stride` bytes apart, times panel p of q.
template <int Bits, bool Minima, int R>
inline void quantized_sums(const QuantizedWeights& q, int p, const uint8_t* rows, size_t stride, const Ahead& ahead,
                           f32v (&out)[R][kVectors]) {
  const size_t to_scales = q.values_bytes(), to_sums = to_scales + size_t(q.groups) * 4;
  const size_t vector = q.scale_bytes / kVectors;
  const uint8_t* block = q.panel(p) + q.factors_bytes();
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) out[r][j] = f32v{};
  for (int g = 0; g < q.groups; ++g, block += q.block_bytes) {
    i32v sums[R][kVectors];
    float scale[R], shift[R];
    for (int r = 0; r < R; ++r) {
      int32_t sum;
      std::memcpy(&scale[r], rows + r * stride + to_scales + size_t(g) * 4, 4);
      std::memcpy(&sum, rows + r * stride + to_sums + size_t(g) * 4, 4);
      shift[r] = -(scale[r] * float(sum));
      for (int j = 0; j < kVectors; ++j) sums[r][j] = i32v{} - q.center * sum;
    }
    group_sums<Bits, R>(block + q.header_bytes(), q.padded, rows + size_t(g) * q.padded, stride, ahead, sums);
    const uint8_t* factors = q.panel(p) + g / q.super_groups * q.super_bytes();
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const uint8_t *of_scales = block + j * vector, *of_minima = of_scales + q.scale_bytes;
      const uint8_t* own = factors + 2 * kWidth * j;
      const f32v scales = load_scales(q.scale_type, of_scales, own);
      const f32v minima = Minima ? load_scales(q.scale_type, of_minima, own + q.factor_bytes) : f32v{};
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        out[r][j] = fma(__builtin_convertvector(sums[r][j], f32v) * scale[r], scales, out[r][j]);
        if (Minima) out[r][j] = fma(splat(shift[r]), minima, out[r][j]);
      }
    }
  }
}

// A layer whose outputs come from one or several quantised matrices, one below the other; all but the last have whole
// panels. A packed input row holds the roundings that the parts need, one for each size of groups.
class QuantizedLinear final : public Linear {
 public:
  // Copies the weights; the bias [n], which may be none, stays where it is.
  QuantizedLinear(const FsQuantized* parts, int count, const float* bias)
      : Linear(total_outputs(parts, count), parts[0].k, row_words(parts, count)), bias_(bias) {
    size_t at = 0;
    int panel = 0;
    parts_.reserve(count);
    for (int i = 0; i < count; ++i) {
      const int same = first_alike(parts, i);
      parts_.push_back({QuantizedWeights(parts[i]), panel, same < i ? parts_[same].at : at, same == i});
      panel += parts_.back().weights.panels;
      if (same == i) at += parts_.back().weights.row_bytes();
    }
  }

  void pack(const float* row, uint32_t* to) const override {
    for (const Part& part : parts_)
      if (part.rounds) quantize_row(part.weights, row, reinterpret_cast<uint8_t*>(to) + part.at);
  }

  void multiply(int p, const uint32_t* packed, int rows, float* out, bool add, int next) const override {
    const Part* part = part_of(p);
    const uint8_t *here = part->panel(p), *following = next < 0 ? nullptr : part_of(next)->panel(next);
    const int most = part->weights.bits == 8 ? kMaxRows : kMaxRowsOf4Bits;
    const int tiles = (rows + most - 1) / most;  // of nearly equal height
    for (int t = 0; t < tiles; ++t) {
      const int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      const uint8_t* x = reinterpret_cast<const uint8_t*>(packed + size_t(begin) * stride) + part->at;
      float* to = out + size_t(begin) * n;
      const Ahead ahead(here, following, t, tiles);
      if (part->weights.bits == 8)
        part->weights.minima ? tile<8, true>(end - begin, *part, p, x, to, add, ahead)
                             : tile<8, false>(end - begin, *part, p, x, to, add, ahead);
      else
        part->weights.minima ? tile<4, true>(end - begin, *part, p, x, to, add, ahead)
                             : tile<4, false>(end - begin, *part, p, x, to, add, ahead);
    }
  }

 private:
  struct Part {
    QuantizedWeights weights;
    int first_panel;
    size_t at;    // bytes of a packed row before its roundings
    bool rounds;  // whether these roundings are its own, not an earlier part's
    const uint8_t* panel(int p) const { return weights.panel(p - first_panel); }
  };

  const Part* part_of(int p) const {
    const Part* part = &parts_.back();
    while (part->first_panel > p) --part;
    return part;
  }

  // The first part with groups of the same size.
  static int first_alike(const FsQuantized* parts, int i) {
    int first = 0;
    while (parts[first].group != parts[i].group) ++first;
    return first;
  }

  static int total_outputs(const FsQuantized* parts, int count) {
    int outputs = 0;
    for (int i = 0; i < count; ++i) outputs += parts[i].n;
    return outputs;
  }

  // 32-bit words of a packed row: its roundings, one for each size of groups.
  static int row_words(const FsQuantized* parts, int count) {
    int words = 0;
    for (int i = 0; i < count; ++i) {
      const int padded = (parts[i].group + kGroupAlignment - 1) / kGroupAlignment * kGroupAlignment;
      if (first_alike(parts, i) == i) words += parts[i].k / parts[i].group * (padded + 8) / 4;
    }
    return words;
  }

  template <int Bits, bool Minima>
  void tile(int rows, const Part& part, int p, const uint8_t* x, float* out, bool add, const Ahead& ahead) const {
    constexpr int kMost = Bits == 8 ? kMaxRows : kMaxRowsOf4Bits;  // taller tiles never come: none is compiled
    switch (rows) {
      case 1: return finish_tile<Bits, Minima, 1>(part, p, x, out, add, ahead);
      case 2: return finish_tile<Bits, Minima, 2>(part, p, x, out, add, ahead);
      case 3: return finish_tile<Bits, Minima, 3>(part, p, x, out, add, ahead);
      case 4: return finish_tile<Bits, Minima, 4>(part, p, x, out, add, ahead);
      case 5: return finish_tile<Bits, Minima, std::min(5, kMost)>(part, p, x, out, add, ahead);
      default: return finish_tile<Bits, Minima, std::min(6, kMost)>(part, p, x, out, add, ahead);
    }
  }

  template <int Bits, bool Minima, int R>
  void finish_tile(const Part& part, int p, const uint8_t* x, float* out, bool add, const Ahead& ahead) const {
    f32v sums[R][kVectors];
    quantized_sums<Bits, Minima, R>(part.weights, p - part.first_panel, x, size_t(stride) * 4, ahead, sums);
    finish_panel<R>(*this, p, bias_, sums, out, add);
  }

  std::vector<Part> parts_;
  const float* bias_;
};

std::unique_ptr<Linear> make_quantized(const FsLinear& from) {
  return std::make_unique<QuantizedLinear>(from.parts, from.num_parts, from.bias);
}

}  // namespace farsight
