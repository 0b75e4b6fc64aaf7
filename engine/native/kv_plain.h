// Keys and values in the model's type.
//
// A block of a head, in lanes of 32 bits (lanes.h):
//   keys    [lanes of head_dim][block_size]    a vector holds tokens
//   values  [lanes of block_size][head_dim]    a vector holds dimensions
// Scores are chains over the dimensions, results are chains over the tokens (ADR 27).
#pragma once

#include "attention.h"

namespace farsight {

template <class T>
struct PlainKv {
  static constexpr int kHeadsTogether = farsight::kHeadsTogether, kMaxValue = kMaxHeadDim;
  static constexpr bool kIsLatent = false;

  template <int N>
  struct Own {};

  static int query_words(int d) { return input_words<T>(d); }

  // Rounds the query of one head.
  static void pack_query(const float* from, int d, uint32_t* to) { pack_inputs<T>(from, d, to); }

  // Writes key and value [kv_heads, head_dim] of one token into its slot.
  static void store(const Shape& shape, const Cache& cache, int64_t slot, const float* key, const float* value) {
    const int d = shape.head_dim, size = shape.block_size, t = int(slot % size);
    constexpr int n = T::kPerLane;
    uint32_t lanes[kMaxHeadDim];
    for (int head = 0; head < shape.kv_heads; ++head) {
      const int64_t at = place(shape, slot / size, head);
      pack<T>(key + head * d, d, lanes);
      auto* k = reinterpret_cast<uint32_t*>(cache.keys + at) + t;
      for (int i = 0; i < d / n; ++i) k[int64_t(i) * size] = lanes[i];
      auto* v = reinterpret_cast<typename T::Element*>(cache.values + at) + t / n * d * n + t % n;
      for (int i = 0; i < d; ++i) v[i * n] = T::narrow(value[head * d + i]);
    }
  }

  // Clears the value that shares a lane with the sequence's last one. It has the weight 0, but 0 * NaN is NaN.
  static void end_values(const Shape& shape, const Cache& cache, const Item& item) {
    constexpr int n = T::kPerLane;
    if (item.kv_len % n == 0) return;
    const int d = shape.head_dim, size = shape.block_size, t = item.kv_len % size;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const int64_t at = place(shape, item.blocks[item.kv_len / size], head);
      auto* v = reinterpret_cast<typename T::Element*>(cache.values + at);
      for (int i = 0; i < d; ++i) v[(t / n * d + i) * n + t % n] = 0;
    }
  }

  // Nothing: queries lie as they are multiplied.
  template <int N>
  static void take_queries(const Shape&, Tile<PlainKv, N>&) {}

  // tile.scores[r][t] = query r . key t for a span, in whole vectors.
  template <int N>
  static void score(const Shape& shape, const Cache& cache, int head, const Span& span, Tile<PlainKv, N>& tile) {
    const int64_t at = place(shape, span.block, head);
    const auto* k = reinterpret_cast<const uint32_t*>(cache.keys + at) + span.offset;
    const auto* v = reinterpret_cast<const uint32_t*>(cache.values + at) + span.offset;
    constexpr int U = vectors_together(N, 2);
    int t = 0;
    for (; t + U * kWidth <= span.count; t += U * kWidth) score_vectors<N, U>(shape, k + t, v + t, tile, span.t + t);
    for (; t < span.count; t += kWidth) score_vectors<N, 1>(shape, k + t, v + t, tile, span.t + t);
  }

  // Rounds the weights.
  template <int N>
  static void take_weights(const Shape&, const Cache&, const int32_t*, int, Tile<PlainKv, N>& tile, int, int count,
                           const int (&)[N], const int (&)[N]) {
    for (int r = 0; r < N; ++r) pack_inputs<T>(tile.scores[r], count, tile.weights[r]);
  }

  // Adds the weighted values of a span to tile.results, one or two vectors of dimensions at a time. The last vector may
  // reach beyond the dimensions, into what lies behind them: no one reads these lanes of the results.
  template <int N>
  static void mix(const Shape& shape, const Cache& cache, int head, const Span& span, Tile<PlainKv, N>& tile) {
    const int d = shape.head_dim;
    const auto* values = reinterpret_cast<const uint32_t*>(cache.values + place(shape, span.block, head)) +
                         int64_t(span.offset / T::kPerLane) * d;
    const uint8_t* ahead = cache.keys + place(shape, span.later, head);
    const int lanes = (span.count + T::kPerLane - 1) / T::kPerLane;
    constexpr int U = vectors_together(N, 2);
    for (int i = 0; i < d; i += U * kWidth) {
      const bool whole = i + kWidth < d;
      f32v acc[N][U];
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u) acc[r][u] = u == 0 || whole ? load<f32v>(tile.results[r] + i + u * kWidth) : f32v{};
      for (int lane = 0; lane < lanes; ++lane, ahead += 64 * U) {
        const uint32_t* v = values + int64_t(lane) * d + i;
        for (int u = 0; u < U; ++u) read_ahead(ahead + 64 * u);
        const int t = span.t / T::kPerLane + lane;
        add_products<T, false>(acc, v, [&](int r) { return tile.weights[r] + t * T::kSteps; }, whole);
      }
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u)
          if (u == 0 || whole) farsight::store(tile.results[r] + i + u * kWidth, acc[r][u]);
    }
  }

  template <int N>
  static void end_chunk(const Shape&, Tile<PlainKv, N>&) {}

 private:
  // The byte where a head of a block begins.
  static int64_t place(const Shape& shape, int64_t block, int head) {
    return (block * shape.kv_heads + head) * shape.head_dim * shape.block_size * int(sizeof(typename T::Element));
  }

  // Scores of U vectors of tokens; the lines of the values that it reads ahead lie as those of the keys do.
  template <int N, int U>
  static void score_vectors(const Shape& shape, const uint32_t* k, const uint32_t* v, Tile<PlainKv, N>& tile, int t) {
    f32v acc[N][U] = {};
    for (int i = 0; i < shape.head_dim / T::kPerLane; ++i) {
      const int64_t at = int64_t(i) * shape.block_size;
      for (int u = 0; u < U; ++u) read_ahead(v + at + u * kWidth);
      add_products<T, false>(acc, k + at, [&](int r) { return tile.query[r] + i * T::kSteps; });
    }
    for (int r = 0; r < N; ++r)
      for (int u = 0; u < U; ++u) farsight::store(tile.scores[r] + t + u * kWidth, acc[r][u]);
  }
};

}  // namespace farsight
