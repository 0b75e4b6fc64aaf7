// Causal attention over the blocks of the KV pool, for decode rows and prompt chunks alike. The kernel reads the keys
// once, kChunkTokens tokens at a time, and corrects the softmax between chunks, so the scratch memory does not grow with
// the context.
//
// A query's result is one sequence of roundings, whatever tile computes it: scores are chains over the dimensions,
// results are chains over the tokens, and the softmax is corrected at the multiples of kChunkTokens, counted from the
// beginning of the sequence. Tokens that a query does not see have the weight 0, which changes no sum.
//
// Layout of a block in one layer, in lanes:
//   keys    [kv_heads][lanes of head_dim][block_size]      a vector holds 16 tokens
//   values  [kv_heads][lanes of block_size][head_dim]      a vector holds 16 dimensions
#pragma once

#include <algorithm>

#include "lanes.h"

namespace farsight {

constexpr int kMaxQueries = 8;     // most queries in one tile: tokens times the heads that share keys
constexpr int kChunkTokens = 128;  // keys between two corrections of the softmax
constexpr int kMaxHeadDim = 256;
constexpr float kLowest = -1e30f;

struct Shape {
  int heads, kv_heads, head_dim, block_size;
  int group() const { return heads / kv_heads; }
};

// Consecutive tokens of one sequence. Their queries are the rows from `row` on, their results go to the rows from
// `out_row` on; the last token is token kv_len - 1 of the sequence.
struct Item {
  int row, out_row, num_queries, kv_len;
  const int32_t* blocks;
};

// Keys and values of one layer of the pool.
struct Cache {
  uint32_t* keys;
  uint32_t* values;
};

// Writes key and value [kv_heads, head_dim] of one token into its slot, rounded to T.
template <class T>
inline void store_kv(const Shape& shape, const Cache& cache, int64_t slot, const float* key, const float* value) {
  const int d = shape.head_dim, size = shape.block_size;
  const int64_t block = slot / size, t = slot % size;
  const int64_t base = block * shape.kv_heads * d * size;
  auto* keys = reinterpret_cast<typename T::Element*>(cache.keys) + base;
  auto* values = reinterpret_cast<typename T::Element*>(cache.values) + base;
  constexpr int n = T::kPerLane;
  uint32_t lanes[kMaxHeadDim];
  for (int head = 0; head < shape.kv_heads; ++head) {
    pack<T>(key + head * d, d, lanes);
    auto* k = reinterpret_cast<uint32_t*>(keys + int64_t(head) * d * size) + t;
    for (int i = 0; i < d / n; ++i) k[int64_t(i) * size] = lanes[i];
    auto* v = values + int64_t(head) * d * size + t / n * d * n + t % n;
    for (int i = 0; i < d; ++i) v[i * n] = T::narrow(value[head * d + i]);
  }
}

// Clears the value that shares a lane with the sequence's last one. It has the weight 0, but 0 * NaN is NaN.
template <class T>
inline void end_values(const Shape& shape, const Cache& cache, const Item& item) {
  if (item.kv_len % T::kPerLane == 0) return;
  const int d = shape.head_dim, size = shape.block_size, t = item.kv_len % size;
  constexpr int n = T::kPerLane;
  const int64_t block = item.blocks[item.kv_len / size];
  auto* values = reinterpret_cast<typename T::Element*>(cache.values) + block * shape.kv_heads * d * size;
  for (int head = 0; head < shape.kv_heads; ++head)
    for (int i = 0; i < d; ++i) values[int64_t(head) * d * size + (t / n * d + i) * n + t % n] = 0;
}

// The running softmax of a tile of N queries.
template <int N>
struct Softmax {
  float highest[N], total[N];
  alignas(64) float scores[N][kChunkTokens];
  alignas(64) uint32_t weights[N][kChunkTokens];
};

// scores[r][t] = query r . key t, for U vectors of tokens of one block from address `k` on. The function prefetches the
// next block's keys and this block's values: blocks lie anywhere in memory, and waiting for them would take most of the
// time.
template <class T, int N, int U>
inline void score_vectors(const uint32_t* k, int lanes, int size, const uint32_t* const (&queries)[N],
                          const uint32_t* next, const uint32_t* values, float (&scores)[N][kChunkTokens], int t) {
  f32v acc[N][U] = {};
  for (int d = 0; d < lanes; ++d) {
    const int64_t at = int64_t(d) * size;
    f32v key[U];
#pragma GCC unroll 2
    for (int u = 0; u < U; ++u) {
      key[u] = load<f32v>(k + at + u * kWidth);
      __builtin_prefetch(next + at + u * kWidth);
      __builtin_prefetch(values + at + u * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
      for (int u = 0; u < U; ++u) acc[r][u] = T::fma(acc[r][u], queries[r][d], key[u]);
  }
  for (int r = 0; r < N; ++r)
    for (int u = 0; u < U; ++u) store(scores[r] + t + u * kWidth, acc[r][u]);
}

// Computes scores[r][t] for the tokens first .. first + count, in whole vectors. No query sees a token from `last` on.
template <class T, int N>
inline void score(const Shape& shape, const Cache& cache, const int32_t* blocks, int kv_head,
                  const uint32_t* const (&queries)[N], int first, int count, int last, Softmax<N>& soft) {
  const int lanes = shape.head_dim / T::kPerLane, size = shape.block_size;
  const int64_t of_head = int64_t(lanes) * size;
  for (int t = 0; t < count;) {
    const int token = first + t, index = token / size, offset = token % size;
    const int64_t at = (blocks[index] * int64_t(shape.kv_heads) + kv_head) * of_head + offset;
    const int following = (index + 1) * size < last ? index + 1 : index;
    const uint32_t* next = cache.keys + (blocks[following] * int64_t(shape.kv_heads) + kv_head) * of_head + offset;
    if (offset + 2 * kWidth <= size && t + 2 * kWidth <= kChunkTokens) {
      score_vectors<T, N, 2>(cache.keys + at, lanes, size, queries, next, cache.values + at, soft.scores, t);
      t += 2 * kWidth;
    } else {
      score_vectors<T, N, 1>(cache.keys + at, lanes, size, queries, next, cache.values + at, soft.scores, t);
      t += kWidth;
    }
  }
}

// Turns the scores of one chunk into weights of its values. Query r sees the tokens begin[r] .. end[r]. The caller must
// multiply the results of earlier chunks by `corrections`.
template <class T, int N>
inline void weigh(Softmax<N>& soft, int first, int count, const int (&begin)[N], const int (&end)[N], float scale,
                  float (&corrections)[N]) {
  i32v lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  for (int r = 0; r < N; ++r) {
    f32v top = splat(kLowest);
    for (int t = 0; t < count; t += kWidth) {
      const i32v token = lane + (first + t);
      const f32v s = load<f32v>(soft.scores[r] + t) * scale;
      const f32v seen = (token >= begin[r]) & (token < end[r]) ? s : splat(kLowest);
      store(soft.scores[r] + t, seen);
      top = max(top, seen);
    }
    const float highest = std::max(soft.highest[r], largest(top));
    corrections[r] = exp(soft.highest[r] - highest);
    soft.highest[r] = highest;
    f32v total = {};
    for (int t = 0; t < count; t += kWidth) {
      const f32v s = load<f32v>(soft.scores[r] + t);
      const f32v weight = s > 0.5f * kLowest ? exp(s - highest) : f32v{};
      store(soft.scores[r] + t, weight);
      total += weight;
    }
    soft.total[r] = soft.total[r] * corrections[r] + sum(total);
    pack<T>(soft.scores[r], count, soft.weights[r]);
  }
}

// Adds weights[r] . values to results[r] for the tokens first .. first + count, two vectors of dimensions at a time.
template <class T, int N>
inline void mix(const Shape& shape, const uint32_t* values, const int32_t* blocks, int kv_head, int first, int count,
                const Softmax<N>& soft, float (*results)[kMaxHeadDim]) {
  const int d = shape.head_dim, size = shape.block_size;
  for (int i = 0; i < d; i += 2 * kWidth) {
    const bool two = i + kWidth < d;
    f32v acc[N][2];
    for (int r = 0; r < N; ++r) {
      acc[r][0] = load<f32v>(results[r] + i);
      acc[r][1] = two ? load<f32v>(results[r] + i + kWidth) : f32v{};
    }
    for (int t = 0; t < count;) {
      const int token = first + t, offset = token % size;
      const int here = std::min(size - offset, count - t);
      const int64_t block = blocks[token / size];
      const uint32_t* v = values + (block * shape.kv_heads + kv_head) * int64_t(d) * (size / T::kPerLane) +
                          int64_t(offset / T::kPerLane) * d + i;
      for (int lane = 0; lane < (here + T::kPerLane - 1) / T::kPerLane; ++lane) {
        const f32v v0 = load<f32v>(v + int64_t(lane) * d);
        const f32v v1 = two ? load<f32v>(v + int64_t(lane) * d + kWidth) : f32v{};
#pragma GCC unroll 8
        for (int r = 0; r < N; ++r) {
          const uint32_t weight = soft.weights[r][t / T::kPerLane + lane];
          acc[r][0] = T::fma(acc[r][0], weight, v0);
          acc[r][1] = T::fma(acc[r][1], weight, v1);
        }
      }
      t += here;
    }
    for (int r = 0; r < N; ++r) {
      store(results[r] + i, acc[r][0]);
      if (two) store(results[r] + i + kWidth, acc[r][1]);
    }
  }
}

// Attends the queries first_query .. first_query + N of an item and KV head, in the order of tokens and then of heads.
// Results are float32 [rows, heads, head_dim].
template <class T, int N>
void attend(const Shape& shape, const Cache& cache, const Item& item, int kv_head, int first_query, int window,
            const uint32_t* queries, float* out) {
  const int d = shape.head_dim, lanes = d / T::kPerLane, group = shape.group();
  const uint32_t* query[N];
  float* result[N];
  int begin[N], end[N];
  Softmax<N> soft;
  alignas(64) float results[N][kMaxHeadDim];
  for (int r = 0; r < N; ++r) {
    const int token = (first_query + r) / group, head = kv_head * group + (first_query + r) % group;
    query[r] = queries + (int64_t(item.row + token) * shape.heads + head) * lanes;
    result[r] = out + (int64_t(item.out_row + token) * shape.heads + head) * d;
    end[r] = item.kv_len - item.num_queries + token + 1;
    begin[r] = window > 0 ? std::max(0, end[r] - window) : 0;
    soft.highest[r] = kLowest;
    soft.total[r] = 0;
    std::fill_n(results[r], d, 0.0f);
  }
  const float scale = 1.0f / std::sqrt(float(d));
  const int last = end[N - 1];
  int count;
  for (int first = begin[0] / kWidth * kWidth; first < last; first += count) {
    count = std::min(kChunkTokens - first % kChunkTokens, (last - first + kWidth - 1) / kWidth * kWidth);
    float corrections[N];
    score<T, N>(shape, cache, item.blocks, kv_head, query, first, count, last, soft);
    weigh<T, N>(soft, first, count, begin, end, scale, corrections);
    for (int r = 0; r < N; ++r)
      if (corrections[r] != 1.0f)
        for (int i = 0; i < d; ++i) results[r][i] *= corrections[r];
    mix<T, N>(shape, cache.values, item.blocks, kv_head, first, std::min(count, last - first), soft, results);
  }
  for (int r = 0; r < N; ++r) {
    const float factor = 1.0f / soft.total[r];
    for (int i = 0; i < d; ++i) result[r][i] = results[r][i] * factor + 0.0f;  // -0 becomes +0, as where weights of 0 are added
  }
}

template <class T>
void attend_tile(const Shape& shape, const Cache& cache, const Item& item, int kv_head, int first_query, int count,
                 int window, const uint32_t* queries, float* out) {
  switch (count) {
#define FARSIGHT_CASE(n) \
  case n: return attend<T, n>(shape, cache, item, kv_head, first_query, window, queries, out);
    FARSIGHT_CASE(1)
    FARSIGHT_CASE(2)
    FARSIGHT_CASE(3)
    FARSIGHT_CASE(4)
    FARSIGHT_CASE(5)
    FARSIGHT_CASE(6)
    FARSIGHT_CASE(7)
    default: return attend<T, kMaxQueries>(shape, cache, item, kv_head, first_query, window, queries, out);
#undef FARSIGHT_CASE
  }
}

}  // namespace farsight
