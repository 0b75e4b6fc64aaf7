// A mixture of experts: each row takes the MLPs that its router scores highest. Rows are sorted by expert, so that a step
// reads the weights of each active expert once; tiles of all experts are one job of the team.
//
// The bits of a row depend on the row alone (ADR 27, ADR 68): an expert's products are those of any matrix, and what the
// experts of a row give is added up in the order in which the router prefers them.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "interface.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace farsight {

template <class V>
void ensure(V& v, size_t n) {
  if (v.size() < n) v.resize(n);
}

struct Experts {
  int count = 0, active = 0;
  bool normalized = false, shared_gate = false, sigmoid = false;
  int groups = 1, active_groups = 1, group_best = 1;
  float scale = 1.0f;
  const float* correction = nullptr;
  const float *router_norm = nullptr, *scales = nullptr;
  FsNorm before{}, after_mlp{}, after{};
  std::unique_ptr<Linear> router;
  std::vector<std::unique_ptr<Linear>> up, down;
};

// Scratch, kept from step to step.
struct ExpertRows {
  std::vector<float> normed, scores, weights, wide, given;
  std::vector<uint32_t> packed;
  std::vector<int> chosen;  // [rows, active]: experts, best first
  std::vector<int> place;   // of each choice: its row among those sorted by expert
  std::vector<int> source;  // of each sorted row: the row of the step
  std::vector<int> owner;   // of each sorted row: its expert
  std::vector<int> first;   // [experts + 1]: an expert's first sorted row
};

// Panels begin .. end of an expert's matrix for some of its rows.
struct ExpertTile {
  int expert, panel, last_panel, begin, end;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Makes the scores of a row -inf but for those of its best groups; of equal groups the lower number counts. Scores that
// are NaN, which have no order, stay for `choose` to find.
inline void keep_groups(const Experts& experts, float* scores) {
  if (std::any_of(scores, scores + experts.count, [](float score) { return score != score; })) return;
  const int size = experts.count / experts.groups;
  std::vector<float> sums(experts.groups), group(size);
  for (int g = 0; g < experts.groups; ++g) {
    std::copy_n(scores + g * size, size, group.begin());
    std::partial_sort(group.begin(), group.begin() + experts.group_best, group.end(), std::greater<float>());
    for (int i = 0; i < experts.group_best; ++i) sums[g] += group[i];
  }
  std::vector<bool> kept(experts.groups);
  for (int i = 0; i < experts.active_groups; ++i) {
    int best = -1;
    for (int g = 0; g < experts.groups; ++g)
      if (!kept[g] && (best < 0 || sums[g] > sums[best])) best = g;
    kept[best] = true;
  }
  for (int i = 0; i < experts.count; ++i)
    if (!kept[i / size]) scores[i] = -std::numeric_limits<float>::infinity();
}

// For a score that is not finite: what the row gives must tell.
inline void lose_row(const Experts& experts, int* chosen, float* weights) {
  for (int i = 0; i < experts.active; ++i) chosen[i] = i, weights[i] = std::numeric_limits<float>::quiet_NaN();
}

// The same as `route` where a weight is not that of a softmax of the chosen scores: sigmoids, or a correction of the choice.
inline void route_by_weight(const Experts& experts, float* scores, int* chosen, float* weights) {
  const int n = experts.count;
  std::vector<float> each(n);
  float whole = 1.0f;
  if (!experts.sigmoid) {
    const float top = *std::max_element(scores, scores + n);
    whole = 0.0f;
    for (int i = 0; i < n; ++i) whole += each[i] = exp(scores[i] - top);
  }
  for (int i = 0; i < n; ++i) {
    each[i] = experts.sigmoid ? sigmoid(scores[i]) : each[i] / whole;
    scores[i] = experts.correction ? each[i] + experts.correction[i] : each[i];
  }
  if (experts.groups > 1) keep_groups(experts, scores);
  float total = 0.0f;
  for (int j = 0; j < experts.active; ++j) {
    int64_t best;
    choose(scores, experts.count, &best);
    if (best < 0) return lose_row(experts, chosen, weights);
    chosen[j] = int(best);
    weights[j] = each[best];
    scores[best] = -std::numeric_limits<float>::infinity();
    total += weights[j];
  }
  const float divisor = experts.normalized ? total + 1e-20f : 1.0f;  // a sigmoid may be 0
  for (int j = 0; j < experts.active; ++j) weights[j] = weights[j] / divisor * experts.scale;
}

// The experts of a row and their weights, best first; of equal scores the lower number. `scores` is changed.
inline void route(const Experts& experts, float* scores, int* chosen, float* weights) {
  const int n = experts.count;
  if (experts.sigmoid || experts.correction) return route_by_weight(experts, scores, chosen, weights);
  float top = scores[0], total = 0.0f;
  for (int i = 1; i < n; ++i) top = std::max(top, scores[i]);
  if (!experts.normalized) {
    f32v sums = {};
    for (int i = 0; i < n; i += kWidth) {
      f32v part = exp(load_first(scores + i, n - i) - top);
      for (int lane = n - i; lane < kWidth; ++lane) part[lane] = 0.0f;
      sums += part;
    }
    total = sum(sums);
  }
  if (experts.groups > 1) keep_groups(experts, scores);
  for (int j = 0; j < experts.active; ++j) {
    int64_t best;
    choose(scores, n, &best);
    if (best < 0) return lose_row(experts, chosen, weights);
    chosen[j] = int(best);
    weights[j] = exp(scores[best] - top);
    scores[best] = -std::numeric_limits<float>::infinity();
    if (experts.normalized) total += weights[j];
  }
  for (int j = 0; j < experts.active; ++j) weights[j] = weights[j] / total * experts.scale;
  if (experts.scales)
    for (int j = 0; j < experts.active; ++j) weights[j] *= experts.scales[chosen[j]];
}

// Sorts the choices of all rows by expert; within an expert rows keep their order.
inline void sort_by_expert(const Experts& experts, int rows, ExpertRows& r) {
  const int choices = rows * experts.active;
  r.first.assign(experts.count + 1, 0);
  for (int i = 0; i < choices; ++i) ++r.first[r.chosen[i] + 1];
  for (int e = 0; e < experts.count; ++e) r.first[e + 1] += r.first[e];
  std::vector<int> next(r.first.begin(), r.first.end() - 1);
  for (int i = 0; i < choices; ++i) {
    const int expert = r.chosen[i], at = next[expert]++;
    r.place[i] = at;
    r.source[at] = i / experts.active;
    r.owner[at] = expert;
  }
}

// Where the packed inputs of a sorted row lie. Experts may have formats of different strides; `longest` is the largest.
inline size_t packed_at(const Linear& matrix, const ExpertRows& r, int expert, int row, size_t longest) {
  return r.first[expert] * longest + size_t(row - r.first[expert]) * matrix.stride;
}

inline size_t longest_stride(const std::vector<std::unique_ptr<Linear>>& matrices) {
  size_t longest = 0;
  for (const auto& matrix : matrices) longest = std::max<size_t>(longest, matrix->stride);
  return longest;
}

// Cuts the products of all active experts into tasks: some panels each, so many that threads end together.
inline std::vector<ExpertTile> tiles_of(const std::vector<std::unique_ptr<Linear>>& matrices, const ExpertRows& r,
                                        int threads) {
  constexpr int kTilesPerThread = 16;
  int panels = 0;
  for (size_t e = 0; e < matrices.size(); ++e)
    if (r.first[e + 1] > r.first[e]) panels += matrices[e]->panels;
  const int run = std::max(1, panels / (kTilesPerThread * threads));
  std::vector<ExpertTile> tiles;
  for (size_t e = 0; e < matrices.size(); ++e) {
    const int rows = r.first[e + 1] - r.first[e];
    const int fitting = std::max(1, kChunkBytes / (matrices[e]->stride * 4 * kMaxRows)) * kMaxRows;
    const int chunks = (rows + fitting - 1) / fitting;
    for (int chunk = 0; chunk < chunks; ++chunk)
      for (int panel = 0; panel < matrices[e]->panels; panel += run)
        tiles.push_back({int(e), panel, std::min(panel + run, matrices[e]->panels),
                         r.first[e] + int(int64_t(rows) * chunk / chunks),
                         r.first[e] + int(int64_t(rows) * (chunk + 1) / chunks)});
  }
  return tiles;
}

// out[sorted row, n] = the product of each packed sorted row with its expert's matrix.
inline void apply_experts(Team& team, const std::vector<std::unique_ptr<Linear>>& matrices, const ExpertRows& r,
                          size_t longest, float* out) {
  const std::vector<ExpertTile> tiles = tiles_of(matrices, r, team.size());
  team.share(int(tiles.size()), [&](int task) {
    const ExpertTile& tile = tiles[task];
    const Linear& matrix = *matrices[tile.expert];
    const uint32_t* packed = r.packed.data() + packed_at(matrix, r, tile.expert, tile.begin, longest);
    for (int panel = tile.panel; panel < tile.last_panel; ++panel) {
      const int next = team.size() == 1 && panel + 1 < tile.last_panel ? panel + 1 : -1;
      matrix.multiply(panel, packed, tile.end - tile.begin, out + size_t(tile.begin) * matrix.n, false, next);
    }
  });
}

// Rows of the step through their experts: r.normed [rows, hidden] into r.given [rows * active, hidden], sorted by
// expert. `activate(wide)` applies the activation to one row of the first product.
template <class Activate>
void run_experts(Team& team, const Experts& experts, int rows, ExpertRows& r, const Activate& activate) {
  const int hidden = experts.router->k, choices = rows * experts.active;
  const size_t up_longest = longest_stride(experts.up), down_longest = longest_stride(experts.down);
  const size_t wide = experts.up[0]->n;
  ensure(r.chosen, choices), ensure(r.weights, choices), ensure(r.place, choices), ensure(r.source, choices);
  ensure(r.owner, choices), ensure(r.packed, choices * std::max(up_longest, down_longest));
  ensure(r.wide, choices * wide), ensure(r.given, size_t(choices) * hidden);
  team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> scores(experts.count);
    for (int row = begin; row < end; ++row) {
      std::copy_n(r.scores.data() + size_t(row) * experts.router->n, experts.count, scores.data());
      route(experts, scores.data(), r.chosen.data() + size_t(row) * experts.active,
            r.weights.data() + size_t(row) * experts.active);
    }
  });
  sort_by_expert(experts, rows, r);
  team.share_ranges(choices, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const Linear& up = *experts.up[r.owner[i]];
      up.pack(r.normed.data() + size_t(r.source[i]) * hidden,
              r.packed.data() + packed_at(up, r, r.owner[i], i, up_longest));
    }
  });
  apply_experts(team, experts.up, r, up_longest, r.wide.data());
  team.share_ranges(choices, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      float* x = r.wide.data() + size_t(i) * wide;
      activate(x);
      const Linear& down = *experts.down[r.owner[i]];
      down.pack(x, r.packed.data() + packed_at(down, r, r.owner[i], i, down_longest));
    }
  });
  apply_experts(team, experts.down, r, down_longest, r.given.data());
}

// What the experts of a row give, times their weights, is added to `to` [n], best first.
inline void add_experts(const Experts& experts, const ExpertRows& r, int row, int n, float* to) {
  for (int j = 0; j < experts.active; ++j) {
    const size_t choice = size_t(row) * experts.active + j;
    const float weight = r.weights[choice];
    const float* from = r.given.data() + size_t(r.place[choice]) * n;
    for (int i = 0; i < n; ++i) to[i] += weight * from[i];
  }
}

}  // namespace farsight
