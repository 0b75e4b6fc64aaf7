// Layers with a state in place of attention: a short convolution, and the gated delta rule behind one. A state is brought
// forward token by token by one thread, in one order: its bits depend neither on how a prompt is cut into steps nor on what
// else a step holds (ADR 27). The same arithmetic as engine/models/mixed.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "lanes.h"
#include "rows.h"

namespace farsight {

constexpr int kMaxTaps = 16;
constexpr int kMaxDelta = 256;  // values of a value, and of a key

inline f32v silu(f32v x) { return x / (1.0f + exp(-x)); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Convolves up to kWidth channels of `rows` consecutive rows, `stride` values apart, in place, behind the window [taps - 1]
// [channels] of the state, which moves on. The products of a row are added from the oldest on.
inline void convolve(const FsMixer& mixer, float* window, float* x, int rows, size_t stride, int channel, bool activated) {
  const int taps = mixer.length, all = mixer.convolved, n = all - channel;
  f32v kept[kMaxTaps], factor[kMaxTaps];
  for (int i = 0; i < taps; ++i) factor[i] = load_first(mixer.taps + i * all + channel, n);
  for (int i = 0; i + 1 < taps; ++i) kept[i] = load_first(window + i * all + channel, n);
  const f32v bias = mixer.bias ? load_first(mixer.bias + channel, n) : f32v{};
  for (int row = 0; row < rows; ++row) {
    float* at = x + row * stride + channel;
    kept[taps - 1] = load_first(at, n);
    f32v y = kept[0] * factor[0];
    for (int i = 1; i < taps; ++i) y = y + kept[i] * factor[i];
    if (mixer.bias) y = y + bias;
    store_first(at, activated ? silu(y) : y, n);
    for (int i = 0; i + 1 < taps; ++i) kept[i] = kept[i + 1];
  }
  for (int i = 0; i + 1 < taps; ++i) store_first(window + i * all + channel, kept[i], n);
}

// The head `from` of n values brought to length 1 and scaled.
inline void unit(const float* from, int n, float scale, float* to) {
  f32v squares = {};
  for (int i = 0; i < n; i += kWidth) {
    const f32v v = load_first(from + i, n - i);
    squares = fma(v, v, squares);
  }
  const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
  for (int i = 0; i < n; ++i) to[i] = from[i] * factor * scale;
}

// Columns of a head's memory [key][value] that a first-level cache holds beside the rows that change them.
constexpr int kColumns = 4;  // in vectors
constexpr int kDeltaRows = 16;

// Some rows of one value head: their keys and queries of length 1, strengths, decays; `values` and `out` of the first one.
struct DeltaRows {
  int rows, key;
  const float *queries, *keys;  // [rows][key]
  const float *strengths, *kept;
  const float* values;
  size_t stride;
  float* out;
  size_t out_stride;
};

// The delta rule on V vectors of columns of a memory, `width` values a row, of which the last vector has n lanes: token by
// token, each column by itself, so that V changes no bit.
template <int V>
inline void delta_columns(const DeltaRows& d, float* memory, int width, int n) {
  const auto get = [n](const float* from, int v) {
    return V > 1 ? load<f32v>(from + v * kWidth) : load_first(from, n);
  };
  for (int row = 0; row < d.rows; ++row) {
    const float *key = d.keys + row * d.key, *query = d.queries + row * d.key, kept = d.kept[row];
    f32v delta[V] = {}, given[V] = {};
    for (int i = 0; i < d.key; ++i) {
      const float* at = memory + size_t(i) * width;
      for (int v = 0; v < V; ++v) delta[v] = fma(get(at, v) * kept, splat(key[i]), delta[v]);
    }
    for (int v = 0; v < V; ++v) delta[v] = (get(d.values + row * d.stride, v) - delta[v]) * d.strengths[row];
    for (int i = 0; i < d.key; ++i) {
      float* at = memory + size_t(i) * width;
      for (int v = 0; v < V; ++v) {
        const f32v m = fma(splat(key[i]), delta[v], get(at, v) * kept);
        given[v] = fma(m, splat(query[i]), given[v]);
        V > 1 ? store(at + v * kWidth, m) : store_first(at, m, n);
      }
    }
    float* out = d.out + row * d.out_stride;
    for (int v = 0; v < V; ++v) V > 1 ? store(out + v * kWidth, given[v]) : store_first(out, given[v], n);
  }
}

// One value head of consecutive rows of a sequence: what was convolved is in x, then gates, strengths and decays; `memory`
// is changed. Writes [value] of each row to out, `out_stride` values apart.
inline void delta_head(const FsMixer& mixer, int head, float* memory, const float* x, int rows, size_t stride, float eps,
                       float* out, size_t out_stride) {
  const int dk = mixer.key, dv = mixer.value, keys = mixer.key_heads * dk;
  const int shared = mixer.tiled ? head % mixer.key_heads : head / (mixer.value_heads / mixer.key_heads);
  const int mixed = mixer.value_heads * dv;
  const float* gates = x + mixer.convolved + head * dv;
  const float* strengths = x + mixer.convolved + mixed + head;
  const float* decays = strengths + mixer.value_heads;
  float query[kDeltaRows * kMaxDelta], key[kDeltaRows * kMaxDelta], strength[kDeltaRows], kept[kDeltaRows];
  for (int first = 0; first < rows; first += kDeltaRows) {
    const int now = std::min(kDeltaRows, rows - first);
    for (int i = 0; i < now; ++i) {
      const size_t from = (first + i) * stride;
      unit(x + from + shared * dk, dk, 1.0f / std::sqrt(float(dk)), query + i * dk);
      unit(x + from + keys + shared * dk, dk, 1.0f, key + i * dk);
      strength[i] = 1.0f / (1.0f + std::exp(-strengths[from]));
      kept[i] = std::exp(mixer.rates[head] * softplus(decays[from] + mixer.steps[head]));
    }
    DeltaRows d = {now, dk, query, key, strength, kept, x + first * stride + 2 * keys + head * dv, stride,
                   out + first * out_stride, out_stride};
    for (int j = 0; j < dv;) {
      const int left = dv - j;
      const int step = left >= 2 * kColumns * kWidth && now == 1 ? 2 * kColumns : left >= kColumns * kWidth ? kColumns : 1;
      if (step == 2 * kColumns)  // of one row the whole memory passes once: in order
        delta_columns<2 * kColumns>(d, memory + j, dv, kWidth);
      else if (step == kColumns)
        delta_columns<kColumns>(d, memory + j, dv, kWidth);
      else
        delta_columns<1>(d, memory + j, dv, std::min(left, kWidth));
      j += step * kWidth, d.values += step * kWidth, d.out += step * kWidth;
    }
    for (int i = first; i < first + now; ++i) {
      float* given = out + i * out_stride;
      rms_norm(given, dv, mixer.norm, eps, given);
      const float* gate = gates + i * stride;
      for (int j = 0; j < dv; j += kWidth)
        store_first(given + j, load_first(given + j, dv - j) * silu(load_first(gate + j, dv - j)), dv - j);
    }
  }
}

// A sequence's state of a layer, and where it is kept behind how many of its rows, ascending.
struct StateRows {
  float* state;
  std::vector<std::pair<int, float*>> keeps;

  // Calls `advance` with the rows up to each place where the state is kept, and `keep` with that place's copy.
  template <class Advance, class Keep>
  void cut(int rows, const Advance& advance, const Keep& keep) const {
    int done = 0;
    for (const auto& [read, copy] : keeps) {
      advance(done, read - done);
      keep(copy);
      done = read;
    }
    if (done < rows) advance(done, rows - done);
  }
};

// What the layer's mixer makes of the rows of all sequences: wide [rows, n] into out [rows, mixed].
inline void mix_rows(Team& team, const FsMixer& mixer, const std::vector<Item>& sequences, const std::vector<StateRows>& states,
                     float* wide, int n, float eps, float* out) {
  const bool is_delta = mixer.kind == kDelta;
  const int parts = std::max(1, std::min(mixer.convolved / kWidth, 4 * team.size()));
  const int vectors = (mixer.convolved + kWidth - 1) / kWidth, c = mixer.convolved;
  team.share(int(sequences.size()) * parts, [&](int task) {
    const Item& item = sequences[task / parts];
    const StateRows& own = states[task / parts];
    const int part = task % parts;
    float* x = wide + size_t(item.row) * n;
    for (int v = vectors * part / parts; v < vectors * (part + 1) / parts; ++v) {
      const int channel = v * kWidth, left = c - channel;
      if (!is_delta)  // the gate of the inputs, that of the outputs, and the inputs
        for (int row = 0; row < item.num_queries; ++row) {
          float* at = x + size_t(row) * n + channel;
          store_first(at, load_first(at, left) * load_first(at + 2 * c, left), left);
        }
      own.cut(
          item.num_queries,
          [&](int first, int count) { convolve(mixer, own.state, x + size_t(first) * n, count, n, channel, is_delta); },
          [&](float* copy) {
            for (int i = channel; i < (mixer.length - 1) * c; i += c) store_first(copy + i, load_first(own.state + i, left), left);
          });
      if (!is_delta)
        for (int row = 0; row < item.num_queries; ++row) {
          const float* at = x + size_t(row) * n + channel;
          store_first(out + size_t(item.row + row) * c + channel, load_first(at + c, left) * load_first(at, left), left);
        }
    }
  });
  if (!is_delta) return;
  const int heads = mixer.value_heads, mixed = heads * mixer.value, size = mixer.key * mixer.value;
  team.share(int(sequences.size()) * heads, [&](int task) {
    const Item& item = sequences[task / heads];
    const StateRows& own = states[task / heads];
    const int head = task % heads;
    const size_t at = size_t(mixer.length - 1) * c + size_t(head) * size;
    own.cut(
        item.num_queries,
        [&](int first, int count) {
          const size_t row = item.row + first;
          delta_head(mixer, head, own.state + at, wide + row * n, count, n, eps, out + row * mixed + head * mixer.value, mixed);
        },
        [&](float* copy) { std::copy_n(own.state + at, size, copy + at); });
  });
}

}  // namespace farsight
