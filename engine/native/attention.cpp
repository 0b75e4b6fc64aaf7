// Causal attention (attention.h) over one format of keys and values: FARSIGHT_KV, which the build names (library.py).
#include "attention.h"
#include "kv_int8.h"
#include "kv_latent.h"
#include "kv_plain.h"

namespace farsight {

// Scales, caps and slopes the scores of a chunk, where a model has more than a scale. Query r is at token end[r] - 1, whose
// own score gets no slope: what all scores of a query have in common does not matter.
template <class Kv, int N>
inline void shape_scores(const Shape& shape, Tile<Kv, N>& tile, int first, int count, const int (&end)[N],
                         float scale) {
  for (int r = 0; r < N; ++r)
    for (int t = 0; t < count; t += kWidth) {
      f32v s = load<f32v>(tile.scores[r] + t) * scale;
      if (shape.cap > 0) s = tanh(s / shape.cap) * shape.cap;
      const i32v behind = lane_numbers() + (first + t + 1 - end[r]);
      if (shape.slopes) s += __builtin_convertvector(behind, f32v) * tile.slope[r];
      store(tile.scores[r] + t, s);
    }
}

// Turns the scores of one chunk into weights of its values, as the format multiplies them. Query r sees the tokens
// begin[r] .. end[r]. Corrects the results of earlier chunks.
template <class Kv, int N>
inline void weigh(const Shape& shape, const Cache& cache, const Item& item, int kv_head, Tile<Kv, N>& tile, int first,
                  int count, const int (&begin)[N], const int (&end)[N], float scale) {
  const i32v lane = lane_numbers();
  for (int r = 0; r < N; ++r) {
    f32v top = splat(kLowest);
    for (int t = 0; t < count; t += kWidth) {
      const i32v token = lane + (first + t);
      const f32v s = load<f32v>(tile.scores[r] + t) * scale;
      const f32v seen = (token >= begin[r]) & (token < end[r]) ? s : splat(kLowest);
      store(tile.scores[r] + t, seen);
      top = max(top, seen);
    }
    const float highest = std::max(tile.highest[r], largest(top));
    const float correction = exp(tile.highest[r] - highest);
    tile.highest[r] = highest;
    f32v total = {};
    for (int t = 0; t < count; t += kWidth) {
      const f32v s = load<f32v>(tile.scores[r] + t);
      const f32v weight = s > 0.5f * kLowest ? exp(s - highest) : f32v{};
      store(tile.scores[r] + t, weight);
      total += weight;
    }
    tile.total[r] = tile.total[r] * correction + sum(total);
    if (correction != 1.0f)
      for (int i = 0; i < shape.value_dim; ++i) tile.results[r][i] *= correction;
  }
  Kv::template take_weights<N>(shape, cache, item.blocks, kv_head, tile, first, count, begin, end);
}

// Attends the queries first_query .. first_query + N of an item, in the order of tokens and then of heads, for `heads`
// KV heads from kv_head on. Results are float32 [rows, heads, value_dim]. `sinks`: a score of each head that
// takes part in the softmax and has no value, or none.
template <class Kv, int N>
void attend(const Shape& shape, const Cache& cache, const Item& item, int kv_head, int heads, int first_query,
            int window, const float* sinks, const uint32_t* queries, float* out) {
  const int d = shape.value_dim, group = shape.group();
  const int words = Kv::query_words(shape.head_dim);
  int begin[N], end[N];
  Tile<Kv, N> tiles[Kv::kHeadsTogether];
  for (int r = 0; r < N; ++r) {
    const int token = (first_query + r) / group;
    end[r] = item.kv_len - item.num_queries + token + 1;
    begin[r] = window > 0 ? std::max(0, end[r] - window) : 0;
    for (int h = 0; h < heads; ++h) {
      const int head = (kv_head + h) * group + (first_query + r) % group;
      tiles[h].query[r] = queries + (int64_t(item.row + token) * shape.heads + head) * words;
      tiles[h].result[r] = out + (int64_t(item.out_row + token) * shape.heads + head) * d;
      tiles[h].slope[r] = shape.slopes ? shape.slopes[head] : 0.0f;
      tiles[h].highest[r] = sinks ? sinks[head] : kLowest;  // as if it had been the first score
      tiles[h].total[r] = sinks ? 1.0f : 0.0f;
      std::fill_n(tiles[h].results[r], whole_vectors(d), 0.0f);
    }
  }
  for (int h = 0; h < heads; ++h) Kv::template take_queries<N>(shape, tiles[h]);
  const float own_scale = shape.scale > 0 ? shape.scale : 1.0f / std::sqrt(float(shape.head_dim));
  const float scale = shape.plain() ? own_scale : 1.0f;
  const int last = end[N - 1];
  int count;
  for (int first = begin[0] / kWidth * kWidth; first < last; first += count) {
    count = std::min(kChunkTokens - first % kChunkTokens, (last - first + kWidth - 1) / kWidth * kWidth);
    each_block(shape, item.blocks, first, count, last, [&](const Span& span) {
      for (int h = 0; h < heads; ++h) Kv::template score<N>(shape, cache, kv_head + h, span, tiles[h]);
    });
    if (!shape.plain())
      for (int h = 0; h < heads; ++h) shape_scores<Kv, N>(shape, tiles[h], first, count, end, own_scale);
    for (int h = 0; h < heads; ++h)
      weigh<Kv, N>(shape, cache, item, kv_head + h, tiles[h], first, count, begin, end, scale);
    each_block(shape, item.blocks, first, std::min(count, last - first), last, [&](const Span& span) {
      for (int h = 0; h < heads; ++h) Kv::template mix<N>(shape, cache, kv_head + h, span, tiles[h]);
    });
    for (int h = 0; h < heads; ++h) Kv::template end_chunk<N>(shape, tiles[h]);
  }
  for (int h = 0; h < heads; ++h)
    for (int r = 0; r < N; ++r) {
      const float factor = 1.0f / tiles[h].total[r];
      // + 0: -0 becomes +0, as where weights of 0 are added
      for (int i = 0; i < d; ++i) tiles[h].result[r][i] = tiles[h].results[r][i] * factor + 0.0f;
    }
}

template <class Kv>
void attend_tile(const Shape& shape, const Cache& cache, const Item& item, int kv_head, int heads, int first_query,
                 int count, int window, const float* sinks, const uint32_t* queries, float* out) {
  switch (count) {
#define FARSIGHT_CASE(n) \
  case n: return attend<Kv, n>(shape, cache, item, kv_head, heads, first_query, window, sinks, queries, out);
    FARSIGHT_CASE(1)
    FARSIGHT_CASE(2)
    FARSIGHT_CASE(3)
    FARSIGHT_CASE(4)
    FARSIGHT_CASE(5)
    FARSIGHT_CASE(6)
    FARSIGHT_CASE(7)
    default: return attend<Kv, kMaxQueries>(shape, cache, item, kv_head, heads, first_query, window, sinks, queries, out);
#undef FARSIGHT_CASE
  }
}

// The tiles of a prompt chunk read the keys of one head again and again, so its heads go one by one.
template <class Kv>
void attend_parts(const Shape& shape, const Cache& cache, const Item& item, int first, int last, int window,
                  const float* sinks, const uint32_t* queries, float* out) {
  const int num_queries = item.num_queries * shape.group();
  const bool heads = shape.kv_heads > 1;
  const int first_query = heads ? 0 : first * kMaxQueries, last_query = heads ? num_queries : last * kMaxQueries;
  const int last_head = heads ? last : 1;
  const int together = num_queries <= kMaxQueries ? Kv::kHeadsTogether : 1;
  for (int head = heads ? first : 0; head < last_head; head += together)
    for (int query = first_query; query < std::min(last_query, num_queries); query += kMaxQueries)
      attend_tile<Kv>(shape, cache, item, head, std::min(together, last_head - head), query,
                      std::min(kMaxQueries, num_queries - query), window, sinks, queries, out);
}

template void attend_parts<FARSIGHT_KV>(const Shape&, const Cache&, const Item&, int, int, int, const float*,
                                        const uint32_t*, float*);

}  // namespace farsight
