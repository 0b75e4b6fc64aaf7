// The integers of attention over keys and values in 8 bits, for any processor that the compiler can be told to build for.
#include "kv_int8.h"

using namespace farsight;

extern "C" {

// Stores `tokens` keys and values [tokens, d] of one head in blocks of 16 tokens, which the caller provides. Then scores
// three queries [3, d], and mixes with the weights [3, 128] of 16 bits: sums [3, d]. At most 128 tokens.
void probe(const float* keys, const float* values, int tokens, int d, const float* queries, const int16_t* weights,
           uint8_t* key_blocks, uint8_t* value_blocks, float* scores, int32_t* sums) {
  const Shape shape{3, 1, d, 16, d};
  const Cache cache{key_blocks, value_blocks};
  int32_t blocks[8] = {7, 6, 5, 4, 3, 2, 1, 0};
  for (int t = 0; t < tokens; ++t)
    Int8Kv::store(shape, cache, int64_t(blocks[t / 16]) * 16 + t % 16, keys + t * d, values + t * d);
  uint32_t words[3][kMaxHeadDim];
  Tile<Int8Kv, 3> tile = {};
  for (int r = 0; r < 3; ++r) {
    Int8Kv::pack_query(queries + r * d, d, words[r]);
    tile.query[r] = words[r];
    std::memcpy(tile.weights[r], weights + 128 * r, 256);
  }
  each_block(shape, blocks, 0, (tokens + 15) / 16 * 16, tokens,
             [&](const Span& span) { Int8Kv::score<3>(shape, cache, 0, span, tile); });
  each_block(shape, blocks, 0, tokens, tokens, [&](const Span& span) { Int8Kv::mix<3>(shape, cache, 0, span, tile); });
  for (int r = 0; r < 3; ++r) {
    std::memcpy(scores + r * tokens, tile.scores[r], tokens * 4);
    std::memcpy(sums + r * d, tile.sums[r], d * 4);
  }
}
}
