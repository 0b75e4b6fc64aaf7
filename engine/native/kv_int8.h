// Keys and values in 8 bits, with a scale for each token and head (ADR 46).
//
// A block of a head:
//   keys    [head_dim / 2][block_size][2] int8, then scales [block_size] float32    a vector holds tokens
//   values  [block_size / 2][head_dim][2] int8, then scales [block_size] float32    a vector holds dimensions
// Pairs are neighbours along the summed dimension. They are multiplied with queries and softmax weights in 16 bits, into
// 32-bit sums, which cannot overflow: 512 dimensions of 127 * 32767, or 128 tokens. Integer sums have no order, so every
// instruction set gives the same.
#pragma once

#include "attention.h"
#include "rounding.h"

namespace farsight {

// Signed bytes as 16-bit integers, a pair in each lane.
inline i32v widen_pairs(const uint8_t* from) {
#if defined(__AVX512BW__)
  return (i32v)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (i32v)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  i32v v;
  for (int i = 0; i < kWidth; ++i)
    v[i] = int32_t(uint32_t(int8_t(from[2 * i + 1])) << 16 | uint16_t(int8_t(from[2 * i])));
  return v;
#endif
}

// acc + the products of both 16-bit integers of v and x, lane by lane; x is the same for all lanes.
inline i32v dot2(i32v acc, i32v v, uint32_t x) {
#if defined(__AVX512VNNI__)
  return (i32v)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)v, _mm512_set1_epi32(int(x)));
#elif defined(__AVX512BW__)
  return acc + (i32v)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi32(int(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return acc + (i32v)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi32(int(x)));
#else
  return acc + (v << 16 >> 16) * int32_t(int16_t(x)) + (v >> 16) * int32_t(int16_t(x >> 16));
#endif
}

struct Int8Kv {
  static constexpr int kMost = 32767;  // the largest rounded query or weight
  static constexpr int kHeadsTogether = farsight::kHeadsTogether, kMaxValue = kMaxHeadDim;
  static constexpr bool kIsLatent = false;

  // The integer sums of a chunk, and the scale of its weights.
  template <int N>
  struct Own {
    alignas(64) int32_t sums[N][kMaxHeadDim];
    float factors[N];
  };

  // A query: pairs of 16 bits, then the scale.
  static int query_words(int d) { return d / 2 + 1; }

  static void pack_query(const float* from, int d, uint32_t* to) {
    round_group<kMost>(from, d, reinterpret_cast<int16_t*>(to), reinterpret_cast<float*>(to + d / 2));
  }

  // Rounds key and value [kv_heads, head_dim] of one token and writes them into its slot. A key that is lost takes its
  // value with it: the result must be NaN, not one without this token.
  static void store(const Shape& shape, const Cache& cache, int64_t slot, const float* key, const float* value) {
    const int d = shape.head_dim, size = shape.block_size, t = int(slot % size);
    int8_t rounded[kMaxHeadDim];
    float key_scale, value_scale;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const int64_t at = place(shape, slot / size, head);
      round_group<127>(key + head * d, d, rounded, &key_scale);
      for (int i = 0; i < d; i += 2) std::memcpy(cache.keys + at + (int64_t(i / 2) * size + t) * 2, rounded + i, 2);
      round_group<127>(value + head * d, d, rounded, &value_scale);
      uint8_t* to = cache.values + at + int64_t(t / 2) * d * 2 + t % 2;
      for (int i = 0; i < d; ++i) to[2 * i] = uint8_t(rounded[i]);
      if (key_scale != key_scale) value_scale = key_scale;
      scales(shape, cache.keys + at)[t] = key_scale;
      scales(shape, cache.values + at)[t] = value_scale;
    }
  }

  // Nothing: a weight of 0 takes any integer off.
  static void end_values(const Shape&, const Cache&, const Item&) {}

  // Nothing: queries lie as they are multiplied.
  template <int N>
  static void take_queries(const Shape&, Tile<Int8Kv, N>&) {}

  template <int N>
  static void score(const Shape& shape, const Cache& cache, int head, const Span& span, Tile<Int8Kv, N>& tile) {
    const int64_t at = place(shape, span.block, head);
    const float* of_keys = scales(shape, cache.keys + at) + span.offset;
    const uint8_t *keys = cache.keys + at + 2 * span.offset, *values = cache.values + at + 2 * span.offset;
    constexpr int U = vectors_together(N, 2);
    int t = 0;
    for (; t + U * kWidth <= span.count; t += U * kWidth)
      score_vectors<N, U>(shape, keys + 2 * t, values + 2 * t, of_keys + t, tile, span.t + t);
    for (; t < span.count; t += kWidth)
      score_vectors<N, 1>(shape, keys + 2 * t, values + 2 * t, of_keys + t, tile, span.t + t);
  }

  // Multiplies the weights by the values' scales and rounds them, those of a chunk together.
  template <int N>
  static void take_weights(const Shape& shape, const Cache& cache, const int32_t* blocks, int head, Tile<Int8Kv, N>& tile,
                           int first, int count, const int (&begin)[N], const int (&end)[N]) {
    each_block(shape, blocks, first, count, first + count, [&](const Span& span) {
      const float* of_values = scales(shape, cache.values + place(shape, span.block, head)) + span.offset;
      for (int t = 0; t < span.count; t += kWidth) {
        const i32v token = lane_numbers() + (first + span.t + t);
        const f32v scale = load<f32v>(of_values + t);
        for (int r = 0; r < N; ++r) {
          float* weights = tile.scores[r] + span.t + t;
          const f32v scaled = load<f32v>(weights) * scale;
          farsight::store(weights, (token >= begin[r]) & (token < end[r]) ? scaled : f32v{});
        }
      }
    });
    for (int r = 0; r < N; ++r) {
      round_group<kMost>(tile.scores[r], count, reinterpret_cast<int16_t*>(tile.weights[r]), &tile.factors[r]);
      std::fill_n(tile.sums[r], whole_vectors(shape.head_dim), 0);
    }
  }

  // Adds the products of a span's weights and values to tile.sums, one or two vectors of dimensions at a time; the last
  // one as in kv_plain.h.
  template <int N>
  static void mix(const Shape& shape, const Cache& cache, int head, const Span& span, Tile<Int8Kv, N>& tile) {
    const int d = shape.head_dim;
    const uint8_t* values = cache.values + place(shape, span.block, head) + int64_t(span.offset) * d;
    const uint8_t* ahead = cache.keys + place(shape, span.later, head);
    const int pairs = (span.count + 1) / 2;
    constexpr int U = vectors_together(N, 2);
    for (int i = 0; i < d; i += U * kWidth) {
      const bool whole = i + kWidth < d;
      i32v acc[N][U];
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u) acc[r][u] = u == 0 || whole ? load<i32v>(tile.sums[r] + i + u * kWidth) : i32v{};
      for (int pair = 0; pair < pairs; ++pair, ahead += 64) {
        read_ahead(ahead);
        const uint8_t* v = values + (int64_t(pair) * d + i) * 2;
        i32v value[U];
#pragma GCC unroll 2
        for (int u = 0; u < U; ++u) value[u] = u == 0 || whole ? widen_pairs(v + 2 * u * kWidth) : i32v{};
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
          const uint32_t weight = tile.weights[r][span.t / 2 + pair];
#pragma GCC unroll 2
          for (int u = 0; u < U; ++u) acc[r][u] = dot2(acc[r][u], value[u], weight);
        }
      }
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u)
          if (u == 0 || whole) farsight::store(tile.sums[r] + i + u * kWidth, acc[r][u]);
    }
  }

  // Takes the sums of a chunk into the results.
  template <int N>
  static void end_chunk(const Shape& shape, Tile<Int8Kv, N>& tile) {
    for (int r = 0; r < N; ++r)
      for (int i = 0; i < shape.head_dim; i += kWidth) {
        const f32v sums = __builtin_convertvector(load<i32v>(tile.sums[r] + i), f32v);
        farsight::store(tile.results[r] + i, fma(sums, splat(tile.factors[r]), load<f32v>(tile.results[r] + i)));
      }
  }

 private:
  // The byte where a head of a block begins.
  static int64_t place(const Shape& shape, int64_t block, int head) {
    return (block * shape.kv_heads + head) * shape.block_size * (shape.head_dim + int(sizeof(float)));
  }

  // The scales behind the integers of a head of a block.
  static float* scales(const Shape& shape, uint8_t* head) {
    return reinterpret_cast<float*>(head + int64_t(shape.block_size) * shape.head_dim);
  }
  static const float* scales(const Shape& shape, const uint8_t* head) {
    return reinterpret_cast<const float*>(head + int64_t(shape.block_size) * shape.head_dim);
  }

  // Scores of U vectors of tokens; the lines of the values that it reads ahead lie as those of the keys do.
  template <int N, int U>
  static void score_vectors(const Shape& shape, const uint8_t* keys, const uint8_t* values, const float* of_keys,
                            Tile<Int8Kv, N>& tile, int t) {
    const int pairs = shape.head_dim / 2;
    i32v acc[N][U] = {};
    for (int i = 0; i < pairs; ++i) {
      const int64_t at = int64_t(i) * shape.block_size * 2;
      const uint8_t* k = keys + at;
      read_ahead(values + at);
      i32v key[U];
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) key[u] = widen_pairs(k + 2 * kWidth * u);
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
        for (int u = 0; u < U; ++u) acc[r][u] = dot2(acc[r][u], key[u], tile.query[r][i]);
    }
    for (int r = 0; r < N; ++r) {
      float of_query;
      std::memcpy(&of_query, tile.query[r] + pairs, sizeof of_query);
      for (int u = 0; u < U; ++u)
        farsight::store(tile.scores[r] + t + u * kWidth, __builtin_convertvector(acc[r][u], f32v) * of_query *
                                                             load<f32v>(of_keys + u * kWidth));
    }
  }
};

}  // namespace farsight
