// Layers with a state in place of attention: a short convolution, and the gated delta rule behind one. A state is brought
// forward token by token by one thread, in one order: its bits depend neither on how a prompt is cut into steps nor on what
// else a step holds (ADR 27). The same arithmetic as engine/models/mixed.py.
#pragma once

#include <algorithm>
#include <cmath>
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

// One value head of consecutive rows of a sequence: what was convolved is in x, then gates, strengths and decays; `memory`
// [key][value] is changed. Writes [value] of each row to out, `out_stride` values apart.
inline void delta_head(const FsMixer& mixer, int head, float* memory, const float* x, int rows, size_t stride, float eps,
                       float* out, size_t out_stride) {
  const int dk = mixer.key, dv = mixer.value, keys = mixer.key_heads * dk;
  const int shared = head / (mixer.value_heads / mixer.key_heads), mixed = mixer.value_heads * dv;
  const float* gates = x + mixer.convolved + head * dv;
  const float* strengths = x + mixer.convolved + mixed + head;
  const float* decays = strengths + mixer.value_heads;
  float query[kMaxDelta], key[kMaxDelta];
  alignas(64) float delta[kMaxDelta + kWidth], given[kMaxDelta + kWidth];
  for (int row = 0; row < rows; ++row) {
    const float* at = x + row * stride;
    unit(at + shared * dk, dk, 1.0f / std::sqrt(float(dk)), query);
    unit(at + keys + shared * dk, dk, 1.0f, key);
    const float* value = at + 2 * keys + head * dv;
    const float strength = 1.0f / (1.0f + exp(-strengths[row * stride]));
    const float kept = std::exp(mixer.rates[head] * softplus(decays[row * stride] + mixer.steps[head]));
    std::fill_n(delta, dv, 0.0f), std::fill_n(given, dv, 0.0f);
    for (int i = 0; i < dk; ++i)
      for (int j = 0; j < dv; j += kWidth)
        store(delta + j, fma(load_first(memory + i * dv + j, dv - j) * kept, splat(key[i]), load<f32v>(delta + j)));
    for (int j = 0; j < dv; ++j) delta[j] = (value[j] - delta[j]) * strength;
    for (int i = 0; i < dk; ++i)
      for (int j = 0; j < dv; j += kWidth) {
        const f32v m = fma(splat(key[i]), load<f32v>(delta + j), load_first(memory + i * dv + j, dv - j) * kept);
        store_first(memory + i * dv + j, m, dv - j);
        store(given + j, fma(m, splat(query[i]), load<f32v>(given + j)));
      }
    rms_norm(given, dv, mixer.norm, eps, given);
    const float* gate = gates + row * stride;
    for (int j = 0; j < dv; j += kWidth)
      store_first(out + row * out_stride + j, load<f32v>(given + j) * silu(load_first(gate + j, dv - j)), dv - j);
  }
}

// What the layer's mixer makes of the rows of all sequences: wide [rows, n] into out [rows, mixed]. `states[i]` is the
// state of the layer of sequence i.
inline void mix_rows(Team& team, const FsMixer& mixer, const std::vector<Item>& sequences, float* const* states, float* wide,
                     int n, float eps, float* out) {
  const bool is_delta = mixer.kind == kDelta;
  const int parts = std::max(1, std::min(mixer.convolved / kWidth, 4 * team.size()));
  const int vectors = (mixer.convolved + kWidth - 1) / kWidth;
  team.share(int(sequences.size()) * parts, [&](int task) {
    const Item& item = sequences[task / parts];
    const int part = task % parts;
    float* x = wide + size_t(item.row) * n;
    for (int v = vectors * part / parts; v < vectors * (part + 1) / parts; ++v) {
      const int channel = v * kWidth, left = mixer.convolved - channel;
      if (is_delta) {
        convolve(mixer, states[task / parts], x, item.num_queries, n, channel, true);
        continue;
      }
      const int c = mixer.convolved;  // the gate of the inputs, that of the outputs, and the inputs
      for (int row = 0; row < item.num_queries; ++row) {
        float* at = x + size_t(row) * n + channel;
        store_first(at, load_first(at, left) * load_first(at + 2 * c, left), left);
      }
      convolve(mixer, states[task / parts], x, item.num_queries, n, channel, false);
      for (int row = 0; row < item.num_queries; ++row) {
        const float* at = x + size_t(row) * n + channel;
        store_first(out + size_t(item.row + row) * c + channel, load_first(at + c, left) * load_first(at, left), left);
      }
    }
  });
  if (!is_delta) return;
  const int heads = mixer.value_heads, mixed = heads * mixer.value;
  team.share(int(sequences.size()) * heads, [&](int task) {
    const Item& item = sequences[task / heads];
    const int head = task % heads;
    float* memory = states[task / heads] + size_t(mixer.length - 1) * mixer.convolved + size_t(head) * mixer.key * mixer.value;
    delta_head(mixer, head, memory, wide + size_t(item.row) * n, item.num_queries, n, eps,
               out + size_t(item.row) * mixed + head * mixer.value, mixed);
  });
}

}  // namespace farsight
