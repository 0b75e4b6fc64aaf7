// Causal attention over the blocks of the KV pool, for decode rows and prompt chunks alike. The kernel reads the keys
// once, kChunkTokens tokens at a time, and corrects the softmax between chunks, so the scratch memory does not grow with
// the context. How a block holds keys and values, and how they are multiplied, is the format's: kv_plain.h, kv_int8.h,
// kv_latent.h.
//
// A query's result is one sequence of roundings, whatever tile computes it: the softmax is corrected at the multiples of
// kChunkTokens, counted from the beginning of the sequence. Tokens that a query does not see have the weight 0, which
// changes no sum.
//
// Order of reads: block by block, and within a block the heads, which lie side by side. One core reads 26 GB/s that way,
// and 11 GB/s if it takes one head of all blocks after the other: then each run of neighbours is one page long, too
// short for the processor to read ahead. While it scores, a format reads ahead the values of the same tokens, and while it
// mixes, the keys of the next chunk.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace farsight {

constexpr int kMaxQueries = 8;     // most queries of a head in one tile: tokens times the heads that share keys
constexpr int kHeadsTogether = 4;  // most KV heads that are read side by side
constexpr int kChunkTokens = 128;  // keys between two corrections of the softmax
constexpr int kMaxHeadDim = 512;
constexpr float kLowest = -1e30f;

struct Shape {
  int heads, kv_heads, head_dim, block_size;
  int value_dim;                  // of the results of a head; of latents less than head_dim
  float scale = 0;                // of products; 0: 1 / sqrt(head_dim)
  float cap = 0;                  // scaled products s become cap * tanh(s / cap); 0: they do not
  const float* slopes = nullptr;  // of ALiBi, by query head, or none
  bool plain() const { return !slopes && cap <= 0; }
  int group() const { return heads / kv_heads; }
};

// Consecutive tokens of one sequence. Their queries are the rows from `row` on, their results go to the rows from
// `out_row` on; the last token is token kv_len - 1 of the sequence.
struct Item {
  int row, out_row, num_queries, kv_len;
  const int32_t* blocks;
};

// Keys and values of one layer of the pool: [blocks][kv_heads][bytes of a head] each.
struct Cache {
  uint8_t* keys;
  uint8_t* values;
};

// The running softmax of N queries of one KV head, with what the format keeps of them besides.
template <class Kv, int N>
struct Tile : Kv::template Own<N> {
  const uint32_t* query[N];
  float* result[N];
  float highest[N], total[N], slope[N];
  alignas(64) float scores[N][kChunkTokens];      // then the weights
  alignas(64) uint32_t weights[N][kChunkTokens];  // as the format multiplies them
  alignas(64) float results[N][Kv::kMaxValue];
};

// Tokens of one block: `count` from `offset` on, the chunk's from `t` on. `later` is the block that the next chunk has in
// this place, or the same block.
struct Span {
  int t, offset, count;
  int64_t block, later;
};

// Calls visit(span) for the tokens first .. first + count of a sequence that goes on to token `last`.
template <class Visit>
inline void each_block(const Shape& shape, const int32_t* blocks, int first, int count, int last, const Visit& visit) {
  const int size = shape.block_size;
  for (int t = 0; t < count;) {
    const int token = first + t, offset = token % size, here = std::min(size - offset, count - t);
    const int later = token + kChunkTokens < last ? token + kChunkTokens : token;
    visit(Span{t, offset, here, blocks[token / size], blocks[later / size]});
    t += here;
  }
}

// The lanes of the vectors that hold n values.
constexpr int whole_vectors(int n) { return (n + kWidth - 1) / kWidth * kWidth; }

inline i32v lane_numbers() {
  i32v lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane;
}

// Parts that an item can be cut into: its KV heads, or where there is one, tiles of its queries.
inline int parts_of(const Shape& shape, const Item& item) {
  return shape.kv_heads > 1 ? shape.kv_heads : (item.num_queries * shape.group() + kMaxQueries - 1) / kMaxQueries;
}

// Attends the parts first .. last of an item. Results are float32 [rows, heads, value_dim]. `sinks`: a score of each
// head that takes part in the softmax and has no value, or none. Each format of keys and values has it in a part of its own
// (attention.cpp).
template <class Kv>
void attend_parts(const Shape& shape, const Cache& cache, const Item& item, int first, int last, int window,
                  const float* sinks, const uint32_t* queries, float* out);

}  // namespace farsight
