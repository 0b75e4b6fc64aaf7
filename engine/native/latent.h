// What latent attention computes row by row and head by head before and behind attention (ADR 75). A head's query is
// brought into the latent's space, where the row of a token is the key of all heads; the sums of rows that attention
// gives are brought back into values. Each head has its own two matrices.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "experts.h"
#include "interface.h"
#include "linear.h"
#include "parts.h"
#include "rows.h"
#include "team.h"

namespace farsight {

constexpr float kLatentEps = 1e-6f;  // of the norms of latents, whatever that of the model's other norms is

struct Latent {
  const float *q_norm, *kv_norm;
  std::unique_ptr<Linear> q_up;                        // none: queries are made of the layer's input
  std::vector<std::unique_ptr<Linear>> keys, values;  // of each head: to the latent's space, and back
  int turned;                                          // values of a query and of a row that are turned by position

  int heads() const { return int(keys.size()); }
  int plain() const { return keys[0]->k; }
  int rank() const { return keys[0]->n; }
  int query() const { return turned + plain(); }
  int width() const { return turned + rank(); }
};

// Scratch, kept from step to step.
struct LatentRows {
  std::vector<float> queries, products;
  std::vector<uint32_t> packed;
};

// The matrices of `count` heads, `stride` values apart: each lies as [n, k], or `transposed` as [k, n].
template <class Element>
std::vector<std::unique_ptr<Linear>> make_each(const FsLinear& first, int count, int stride, bool transposed) {
  std::vector<std::unique_ptr<Linear>> matrices;
  std::vector<Element> rows(size_t(first.n) * first.k);
  FsLinear each = first;
  for (int head = 0; head < count; ++head) {
    const Element* from = static_cast<const Element*>(first.weight) + size_t(head) * stride;
    for (int i = 0; transposed && i < first.n; ++i)
      for (int j = 0; j < first.k; ++j) rows[size_t(i) * first.k + j] = from[size_t(j) * first.n + i];
    each.weight = transposed ? rows.data() : from;
    matrices.push_back(make_dense(sizeof(Element) == 2, each));
  }
  return matrices;
}

inline std::vector<std::unique_ptr<Linear>> make_each(bool bf16, const FsLinear& first, int count, int stride,
                                                      bool transposed) {
  return bf16 ? make_each<uint16_t>(first, count, stride, transposed) : make_each<float>(first, count, stride, transposed);
}

// out[head][row][n] = the product of the packed rows [head][row] with the head's matrix.
inline void apply_heads(Team& team, const std::vector<std::unique_ptr<Linear>>& matrices, const uint32_t* packed, int rows,
                        float* out) {
  const Linear& like = *matrices[0];
  team.share(int(matrices.size()) * like.panels, [&](int task) {
    const size_t head = task / like.panels;
    const int panel = task % like.panels, next = team.size() == 1 && panel + 1 < like.panels ? panel + 1 : -1;
    matrices[head]->multiply(panel, packed + head * rows * like.stride, rows, out + head * rows * like.n, false, next);
  });
}

// Queries of `rows` rows in the latent's space: from the first values of each row of `made`, which are `stride` apart and
// are changed, to take(row, head, query [width]).
template <class Turn, class Take>
void make_queries(Team& team, const Latent& latent, float* made, int stride, int rows, LatentRows& r, const Turn& turn,
                  const Take& take) {
  const int heads = latent.heads(), turned = latent.turned;
  const Linear& keys = *latent.keys[0];
  float* queries = made;
  if (latent.q_up) {
    const Linear& up = *latent.q_up;
    ensure(r.packed, size_t(rows) * up.stride), ensure(r.queries, size_t(rows) * up.n);
    team.share_ranges(rows, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        float* from = made + size_t(row) * stride;
        rms_norm(from, up.k, latent.q_norm, kLatentEps, from);
        up.pack(from, r.packed.data() + size_t(row) * up.stride);
      }
    });
    apply(team, up, r.packed.data(), rows, r.queries.data(), false);
    queries = r.queries.data();
    stride = up.n;
  }
  ensure(r.packed, size_t(heads) * rows * keys.stride), ensure(r.products, size_t(heads) * rows * keys.n);
  team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row)
      for (int head = 0; head < heads; ++head)
        keys.pack(queries + size_t(row) * stride + head * latent.query() + turned,
                  r.packed.data() + (size_t(head) * rows + row) * keys.stride);
  });
  apply_heads(team, latent.keys, r.packed.data(), rows, r.products.data());
  team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> query(latent.width());
    for (int row = begin; row < end; ++row)
      for (int head = 0; head < heads; ++head) {
        std::copy_n(queries + size_t(row) * stride + head * latent.query(), turned, query.data());
        turn(row, query.data());
        std::copy_n(r.products.data() + (size_t(head) * rows + row) * keys.n, keys.n, query.data() + turned);
        take(row, head, query.data());
      }
  });
}

// Packs what attention gives a row, [heads][rank], for the product with `values`; `rows` are computed together.
inline void pack_sums(const Latent& latent, const float* sums, int row, int rows, LatentRows& r) {
  const Linear& values = *latent.values[0];
  for (int head = 0; head < latent.heads(); ++head)
    values.pack(sums + head * latent.rank(), r.packed.data() + (size_t(head) * rows + row) * values.stride);
}

// Values of `rows` rows, of what `pack_sums` has packed, as inputs of `out`.
inline void make_values(Team& team, const Latent& latent, const Linear& out, int rows, LatentRows& r, uint32_t* packed) {
  const int heads = latent.heads(), n = latent.values[0]->n;
  ensure(r.products, size_t(heads) * rows * n);
  apply_heads(team, latent.values, r.packed.data(), rows, r.products.data());
  team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> values(size_t(heads) * n);
    for (int row = begin; row < end; ++row) {
      for (int head = 0; head < heads; ++head)
        std::copy_n(r.products.data() + (size_t(head) * rows + row) * n, n, values.data() + head * n);
      out.pack(values.data(), packed + size_t(row) * out.stride);
    }
  });
}

}  // namespace farsight
