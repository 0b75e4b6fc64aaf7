// Matrix products of activations in 8 bits with weights in 8 or 4 bits (quantized.h), into float32.
//
// Each output is exactly specified (ADR 42): for each group, in ascending order, the integer
//   I = sum of q * x over the group - center * sum of x,            exact in 32 bits
// and then  out = fma(float(I) * scale of x, scale of w, out), and with minima
//           out = fma(-(scale of x * float(sum of x)), minimum of w, out).
// Then the bias is added, then what the output is added to. Integer sums have no order, so every instruction set
// gives the same I; the float part does not depend on tiles, rows or threads.
#include <utility>
#include <vector>

#include "parts.h"
#include "quantized.h"

namespace farsight {

// Most rows of a tile. Groups of 4-bit weights are small: with more rows, what the registers do not hold of the float sums
// comes and goes with each group, which costs more than to unpack the weights again for the next tile. Where the
// registers do not even hold those of four rows, it is the other way round. Small weights take two quads at a time.
template <ValueType Type>
constexpr int kMostRows = Type == kBytes || (Type == kNibbles && kRegisters == 16) ? kMaxRows : 4;

// Vectors of each row that are computed together: as many as leave registers for as many of weights, and two more. One row
// needs no more than six registers besides, and reads a panel as it lies in memory.
constexpr int vectors_of(int rows) {
  int vectors = kVectors;
  if (rows == 1 && vectors + 6 <= kRegisters) return vectors;
  while (vectors > 1 && (rows + 1) * vectors + 2 > kRegisters) vectors /= 2;
  return vectors;
}

inline int32_t quad(const uint8_t* from) {
  int32_t x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

#ifdef FARSIGHT_WORDS
// The first or the second quads of inputs of bytes that hold two.
inline u32v nibbles(const uint8_t* from, int second) {
  const u32v both = load<u32v>(from);
  return (second ? both >> 4 : both) & 0x0f0f0f0fu;
}

// Adds the products of a group with one row of activations to V vectors of a panel. No vector of weights is used twice, so
// none of them waits in a register.
template <ValueType Type, int V>
inline void add_group_of_row(const uint8_t* from, int padded, const uint8_t* x, const Ahead* ahead, i32v (&acc)[V]) {
  if constexpr (Type == kNibbles) {
    for (int k = 0; k < padded;) {
      i16v words[V] = {};
      for (const int end = std::min(padded, k + 4 * kNibbleQuads); k < end; k += 8, from += 4 * kPanel) {
        if (ahead) ahead->step(from);
        const i32v one = splat_int(quad(x + k)), other = splat_int(quad(x + k + 4));
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
          const uint8_t* at = from + 4 * kWidth * v;
          settle(words[v] += mul_bytes(nibbles(at, 0), one) + mul_bytes(nibbles(at, 1), other));
        }
      }
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[v] += widen(words[v]);
    }
  } else if constexpr (Type == kSmall) {
    for (int k = 0; k < padded; k += 8, from += 8 * kPanel) {
      if (ahead) ahead->step(from), ahead->step(from + 4 * kPanel);
      const i32v one = splat_int(quad(x + k)), other = splat_int(quad(x + k + 4));
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const uint8_t* at = from + 4 * kWidth * v;
        settle(acc[v] += widen(mul_bytes(load<u32v>(at), one) + mul_bytes(load<u32v>(at + 4 * kPanel), other)));
      }
    }
  } else {
    for (int k = 0; k < padded; k += 4, from += 4 * kPanel) {
      if (ahead) ahead->step(from);
      const i32v even = splat_int(quad(x + 2 * k)), odd = splat_int(quad(x + 2 * k + 4));
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const u32v bytes = load<u32v>(from + 4 * kWidth * v);
        settle(acc[v] += mul_words((i32v)(bytes & 0x00ff00ffu), even) + mul_words((i32v)((u16v)bytes >> 8), odd));
      }
    }
  }
}

// Adds the products of a group with R rows of activations, `stride` bytes apart, to V vectors of a panel.
template <ValueType Type, int R, int V>
inline void add_group(const uint8_t* from, int padded, const uint8_t* x, size_t stride, const Ahead* ahead,
                      i32v (&acc)[R][V]) {
  if constexpr (R == 1) {
    add_group_of_row<Type, V>(from, padded, x, ahead, acc[0]);
  } else if constexpr (Type == kNibbles) {
    for (int k = 0; k < padded;) {
      i16v words[R][V] = {};
      for (const int end = std::min(padded, k + 4 * kNibbleQuads); k < end; k += 8, from += 4 * kPanel) {
        if (ahead) ahead->step(from);
#pragma GCC unroll 2
        for (int second = 0; second < 2; ++second) {
          u32v w[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) w[v] = nibbles(from + 4 * kWidth * v, second);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            const i32v input = splat_int(quad(x + r * stride + k + 4 * second));
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) words[r][v] += mul_bytes(w[v], input);
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] += widen(words[r][v]);
    }
  } else if constexpr (Type == kSmall) {
    static_assert(kSmallQuads == 2);
    for (int k = 0; k < padded; k += 8, from += 8 * kPanel) {
      if (ahead) ahead->step(from), ahead->step(from + 4 * kPanel);
      u32v first[V], second[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        first[v] = load<u32v>(from + 4 * kWidth * v);
        second[v] = load<u32v>(from + 4 * kPanel + 4 * kWidth * v);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const i32v one = splat_int(quad(x + r * stride + k)), other = splat_int(quad(x + r * stride + k + 4));
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] += widen(mul_bytes(first[v], one) + mul_bytes(second[v], other));
      }
    }
  } else {
    for (int k = 0; k < padded; k += 4, from += 4 * kPanel) {
      if (ahead) ahead->step(from);
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        i32v w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const u32v bytes = load<u32v>(from + 4 * kWidth * v);
          w[v] = odd ? (i32v)((u16v)bytes >> 8) : (i32v)(bytes & 0x00ff00ffu);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          const i32v input = splat_int(quad(x + r * stride + 2 * k + 4 * odd));
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) settle(acc[r][v] += mul_words(w[v], input));
        }
      }
    }
  }
}
#else
template <ValueType Type, int R, int V>
inline void add_group(const uint8_t* from, int padded, const uint8_t* x, size_t stride, const Ahead* ahead,
                      i32v (&acc)[R][V]) {
  constexpr int kInputs = Type == kNibbles ? 8 : 4;
  for (int k = 0; k < padded; k += kInputs, from += 4 * kPanel) {
    if (ahead) ahead->step(from);
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const u32v both = load<u32v>(from + 4 * kWidth * v);
      const u32v first = Type == kNibbles ? both & 0x0f0f0f0fu : both, second = both >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        acc[r][v] = dot4(acc[r][v], first, quad(x + r * stride + k));
        if (Type == kNibbles) acc[r][v] = dot4(acc[r][v], second, quad(x + r * stride + k + 4));
      }
    }
  }
}
#endif

// R rows, `stride` bytes apart, times panel p of q.
template <ValueType Type, bool Minima, int R>
inline void quantized_sums(const QuantizedWeights& q, int p, const uint8_t* rows, size_t stride, const Ahead& ahead,
                           f32v (&out)[R][kVectors]) {
  constexpr int V = vectors_of(R);
  const size_t to_scales = q.values_bytes(), to_sums = to_scales + size_t(q.groups) * 4;
  const size_t vector = q.scale_bytes / kVectors, group_bytes = q.group_bytes();
  const uint8_t* block = q.panel(p) + q.factors_bytes();
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) out[r][j] = f32v{};
  for (int g = 0; g < q.groups; ++g, block += q.block_bytes) {
    int32_t start[R];
    float scale[R], shift[R];
    for (int r = 0; r < R; ++r) {
      int32_t sum;
      std::memcpy(&scale[r], rows + r * stride + to_scales + size_t(g) * 4, 4);
      std::memcpy(&sum, rows + r * stride + to_sums + size_t(g) * 4, 4);
      shift[r] = -(scale[r] * float(sum));
      start[r] = Type == kNibbles && Minima ? 0 : -q.center * sum;
    }
    const uint8_t* factors = q.panel(p) + g / q.super_groups * q.super_bytes();
    for (int j = 0; j < kVectors; j += V) {
      i32v acc[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] = splat_int(start[r]);
      add_group<Type, R, V>(block + q.header_bytes() + 4 * kWidth * j, q.padded, rows + g * group_bytes, stride,
                            j == 0 ? &ahead : nullptr, acc);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const uint8_t *of_scales = block + (j + v) * vector, *of_minima = of_scales + q.scale_bytes;
        const uint8_t* own = factors + 2 * kWidth * (j + v);
        const f32v scales = load_scales(q.scale_type, of_scales, own);
        const f32v minima = Minima ? load_scales(q.scale_type, of_minima, own + q.factor_bytes) : f32v{};
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          f32v sum = fma(__builtin_convertvector(acc[r][v], f32v) * scale[r], scales, out[r][j + v]);
          if (Minima) sum = fma(splat(shift[r]), minima, sum);
          out[r][j + v] = sum;
        }
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
      : QuantizedLinear(make_parts(parts, count), bias) {}

  void pack(const float* row, uint32_t* to) const override {
    for (const Part& part : parts_)
      if (part.rounds) quantize_row(part.weights, row, reinterpret_cast<uint8_t*>(to) + part.at);
  }

  void multiply(int p, const uint32_t* packed, int rows, float* out, bool add, int next) const override {
    const Part* part = part_of(p);
    const uint8_t *here = part->panel(p), *following = next < 0 ? nullptr : part_of(next)->panel(next);
    const int most = most_rows(part->weights.value_type);
    const int tiles = (rows + most - 1) / most;  // of nearly equal height
    for (int t = 0; t < tiles; ++t) {
      const int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      const uint8_t* x = reinterpret_cast<const uint8_t*>(packed + size_t(begin) * stride) + part->at;
      float* to = out + size_t(begin) * n;
      const Ahead ahead(here, following, t, tiles);
      switch (part->weights.value_type) {
        case kNibbles: tile<kNibbles>(end - begin, *part, p, x, to, add, ahead); break;
        case kBytes: tile<kBytes>(end - begin, *part, p, x, to, add, ahead); break;
#ifdef FARSIGHT_WORDS
        case kSmall: tile<kSmall>(end - begin, *part, p, x, to, add, ahead); break;
#else
        case kSmall: break;  // nothing is packed so
#endif
      }
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

  QuantizedLinear(std::vector<Part> parts, const float* bias)
      : Linear(total_outputs(parts), parts[0].weights.k, row_words(parts)), parts_(std::move(parts)), bias_(bias) {}

  static std::vector<Part> make_parts(const FsQuantized* from, int count) {
    std::vector<Part> parts;
    size_t at = 0;
    int panel = 0;
    parts.reserve(count);
    for (int i = 0; i < count; ++i) {
      parts.push_back({QuantizedWeights(from[i]), panel, at, true});
      Part& part = parts.back();
      panel += part.weights.panels;
      for (const Part& earlier : parts)
        if (&earlier != &part && earlier.rounds && alike(earlier.weights, part.weights))
          part.at = earlier.at, part.rounds = false;
      if (part.rounds) at += part.weights.row_bytes();
    }
    return parts;
  }

  // Whether the same roundings suit both.
  static bool alike(const QuantizedWeights& a, const QuantizedWeights& b) {
    return a.group == b.group && a.wide() == b.wide();
  }

  static int total_outputs(const std::vector<Part>& parts) {
    int outputs = 0;
    for (const Part& part : parts) outputs += part.weights.n;
    return outputs;
  }

  static int row_words(const std::vector<Part>& parts) {
    size_t bytes = 0;
    for (const Part& part : parts) bytes += part.rounds ? part.weights.row_bytes() : 0;
    return int(bytes / 4);
  }

  static int most_rows(ValueType type) {
    return type == kNibbles ? kMostRows<kNibbles> : type == kBytes ? kMostRows<kBytes> : kMostRows<kSmall>;
  }

  template <ValueType Type>
  void tile(int rows, const Part& part, int p, const uint8_t* x, float* out, bool add, const Ahead& ahead) const {
    part.weights.minima ? tile<Type, true>(rows, part, p, x, out, add, ahead)
                        : tile<Type, false>(rows, part, p, x, out, add, ahead);
  }

  template <ValueType Type, bool Minima>
  void tile(int rows, const Part& part, int p, const uint8_t* x, float* out, bool add, const Ahead& ahead) const {
    constexpr int kMost = kMostRows<Type>;  // taller tiles never come: none is compiled
    switch (rows) {
      case 1: return finish_tile<Type, Minima, 1>(part, p, x, out, add, ahead);
      case 2: return finish_tile<Type, Minima, 2>(part, p, x, out, add, ahead);
      case 3: return finish_tile<Type, Minima, 3>(part, p, x, out, add, ahead);
      case 4: return finish_tile<Type, Minima, 4>(part, p, x, out, add, ahead);
      case 5: return finish_tile<Type, Minima, std::min(5, kMost)>(part, p, x, out, add, ahead);
      default: return finish_tile<Type, Minima, std::min(6, kMost)>(part, p, x, out, add, ahead);
    }
  }

  template <ValueType Type, bool Minima, int R>
  void finish_tile(const Part& part, int p, const uint8_t* x, float* out, bool add, const Ahead& ahead) const {
    f32v sums[R][kVectors];
    quantized_sums<Type, Minima, R>(part.weights, p - part.first_panel, x, size_t(stride) * 4, ahead, sums);
    finish_panel(*this, p, bias_, sums, R, out, add);
  }

  std::vector<Part> parts_;
  const float* bias_;
};

std::unique_ptr<Linear> make_quantized(const FsLinear& from) {
  return std::make_unique<QuantizedLinear>(from.parts, from.num_parts, from.bias);
}

}  // namespace farsight
