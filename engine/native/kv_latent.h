// Latents: one row of a token is the key of all heads, and its last part is their value (ADR 75).
//
// A block holds [block_size][head_dim] values in the model's type, as torch operations lay it out. A vector of scores holds
// queries, which share the row; a vector of results holds dimensions. The chains are those of kv_plain.h.
#pragma once

#include "attention.h"

namespace farsight {

constexpr int kMaxLatent = 576;  // the widest row: a latent of 512 values, and 64 that are turned

typedef uint16_t Narrow __attribute__((vector_size(2 * kWidth)));

// The lanes of the same dimensions of T::kPerLane neighbouring tokens, whose rows are `stride` values apart.
inline f32v token_lanes(const float* rows, int) { return load<f32v>(rows); }

inline f32v token_lanes(const uint16_t* rows, int stride) {
  const u32v first = __builtin_convertvector(load<Narrow>(rows), u32v);
  return (f32v)(first | __builtin_convertvector(load<Narrow>(rows + stride), u32v) << 16);
}

template <class T>
struct LatentKv {
  typedef typename T::Element Element;
  static constexpr int kHeadsTogether = 1, kMaxValue = kMaxLatent;
  static constexpr bool kIsLatent = true;
  static constexpr int kVectors = (kMaxQueries + kWidth - 1) / kWidth;  // of the queries of a tile
  static constexpr int kTokens = kVectors > 1 ? 4 : 8;                  // that are scored together: kWidth is a multiple

  // The words of the queries, side by side: [words of head_dim][kVectors * kWidth].
  template <int N>
  struct Own {
    alignas(64) uint32_t words[input_words<T>(kMaxLatent) * kVectors * kWidth];
  };

  static int query_words(int d) { return input_words<T>(d); }

  static void pack_query(const float* from, int d, uint32_t* to) { pack_inputs<T>(from, d, to); }

  // Writes the row [head_dim] of one token into its slot.
  static void store(const Shape& shape, const Cache& cache, int64_t slot, const float* row, const float*) {
    Element* to = at(shape, cache, slot);
    for (int i = 0; i < shape.head_dim; ++i) to[i] = T::narrow(row[i]);
  }

  // Clears the row that shares lanes with the sequence's last one. It has the weight 0, but 0 * NaN is NaN.
  static void end_values(const Shape& shape, const Cache& cache, const Item& item) {
    if (item.kv_len % T::kPerLane == 0) return;
    const int64_t block = item.blocks[item.kv_len / shape.block_size];
    std::fill_n(at(shape, cache, block * shape.block_size + item.kv_len % shape.block_size), shape.head_dim, Element(0));
  }

  template <int N>
  static void take_queries(const Shape& shape, Tile<LatentKv, N>& tile) {
    const int words = query_words(shape.head_dim);
    std::fill_n(tile.words, words * kVectors * kWidth, 0u);
    for (int r = 0; r < N; ++r)
      for (int i = 0; i < words; ++i) tile.words[i * kVectors * kWidth + r] = tile.query[r][i];
  }

  template <int N>
  static void score(const Shape& shape, const Cache& cache, int, const Span& span, Tile<LatentKv, N>& tile) {
    const Element* rows = at(shape, cache, span.block * shape.block_size + span.offset);
    for (int t = 0; t < span.count; t += kTokens)
      score_tokens<N>(rows + int64_t(t) * shape.head_dim, shape.head_dim, tile, span.t + t);
  }

  // Rounds the weights.
  template <int N>
  static void take_weights(const Shape&, const Cache&, const int32_t*, int, Tile<LatentKv, N>& tile, int, int count,
                           const int (&)[N], const int (&)[N]) {
    for (int r = 0; r < N; ++r) pack_inputs<T>(tile.scores[r], count, tile.weights[r]);
  }

  // Adds the weighted values of a span to tile.results; the last vector as in kv_plain.h.
  template <int N>
  static void mix(const Shape& shape, const Cache& cache, int, const Span& span, Tile<LatentKv, N>& tile) {
    const int d = shape.head_dim, n = shape.value_dim;
    const Element* values = at(shape, cache, span.block * shape.block_size + span.offset) + (d - n);
    const int lanes = (span.count + T::kPerLane - 1) / T::kPerLane;
    constexpr int U = vectors_together(N, 2);
    for (int i = 0; i < n; i += U * kWidth) {
      const bool whole = i + kWidth < n;
      f32v acc[N][U];
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u) acc[r][u] = u == 0 || whole ? load<f32v>(tile.results[r] + i + u * kWidth) : f32v{};
      for (int lane = 0; lane < lanes; ++lane) {
        const Element* from = values + int64_t(lane) * T::kPerLane * d + i;
        f32v held[U];
        for (int u = 0; u < U; ++u) held[u] = u == 0 || whole ? token_lanes(from + u * kWidth, d) : f32v{};
        const int at = (span.t / T::kPerLane + lane) * T::kSteps;
#pragma GCC unroll 2
        for (int step = 0; step < T::kSteps; ++step)
#pragma GCC unroll 8
          for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
            for (int u = 0; u < U; ++u)
              acc[r][u] = T::fma(acc[r][u], tile.weights[r][at + step], T::part(step, held[u]));
      }
      for (int r = 0; r < N; ++r)
        for (int u = 0; u < U; ++u)
          if (u == 0 || whole) farsight::store(tile.results[r] + i + u * kWidth, acc[r][u]);
    }
  }

  template <int N>
  static void end_chunk(const Shape&, Tile<LatentKv, N>&) {}

 private:
  static Element* at(const Shape& shape, const Cache& cache, int64_t slot) {
    return reinterpret_cast<Element*>(cache.keys) + slot * shape.head_dim;
  }

  // acc + the product of queries and a lane of a row, which they share.
  static f32v add(f32v acc, f32v queries, uint32_t lane, int step) {
    if constexpr (T::kSteps == T::kPerLane) return farsight::fma(T::part(step, (f32v)(lane - u32v{})), queries, acc);
    return T::fma(acc, lane, queries);
  }

  // Scores of kTokens tokens from tile.scores[r][t] on.
  template <int N>
  static void score_tokens(const Element* rows, int d, Tile<LatentKv, N>& tile, int t) {
    constexpr int V = (N + kWidth - 1) / kWidth;
    f32v acc[kTokens][V] = {};
    const uint32_t* words = tile.words;
    for (int i = 0; i < d; i += T::kPerLane, words += T::kSteps * kVectors * kWidth) {
      f32v queries[T::kSteps][V];
#pragma GCC unroll 2
      for (int step = 0; step < T::kSteps; ++step)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) queries[step][v] = load<f32v>(words + (step * kVectors + v) * kWidth);
#pragma GCC unroll 8
      for (int token = 0; token < kTokens; ++token) {
        const uint32_t lane = load<uint32_t>(rows + int64_t(token) * d + i);
#pragma GCC unroll 2
        for (int step = 0; step < T::kSteps; ++step)
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) acc[token][v] = add(acc[token][v], queries[step][v], lane, step);
      }
    }
    for (int token = 0; token < kTokens; ++token)
      for (int r = 0; r < N; ++r) tile.scores[r][t + token] = acc[token][r / kWidth][r % kWidth];
  }
};

}  // namespace farsight
