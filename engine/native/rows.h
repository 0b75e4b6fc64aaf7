// What a step computes row by row between matrix products and attention: norms, rotary embedding, activations, the best
// token. Every sum has one order (ADR 27).
#pragma once

#include "interface.h"
#include "lanes.h"

namespace farsight {

// Sums add value i to lane i % kWidth.
inline float mean(const float* x, int n) {
  f32v s = {};
  for (int i = 0; i < n; i += kWidth) s += load_first(x + i, n - i);
  return sum(s) / n;
}

inline float mean_square(const float* x, int n) {
  f32v s = {};
  for (int i = 0; i < n; i += kWidth) {
    const f32v v = load_first(x + i, n - i);
    s = fma(v, v, s);
  }
  return sum(s) / n;
}

inline void rms_norm(const float* x, int n, const float* weight, float eps, float* out) {
  const float factor = 1.0f / std::sqrt(mean_square(x, n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

inline void layer_norm(const float* x, int n, const FsNorm& norm, float eps, float* out) {
  const float center = mean(x, n);
  for (int i = 0; i < n; ++i) out[i] = x[i] - center;
  const float factor = 1.0f / std::sqrt(mean_square(out, n) + eps);
  for (int i = 0; i < n; ++i) out[i] = out[i] * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
}

// Applies the rotary embedding to the first rotary_dim values: value i and value i + rotary_dim / 2 are one pair.
inline void rotate(float* head, int rotary_dim, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// silu(gate) * up, in place of the gate.
inline void gate_up(float* gate, const float* up, int n) {
  for (int i = 0; i < n; i += kWidth) {
    const f32v g = load_first(gate + i, n - i);
    store_first(gate + i, g / (1.0f + exp(-g)) * load_first(up + i, n - i), n - i);
  }
}

// (up + 1) * gate * sigmoid(alpha * gate) of a gate of at most `limit` and of `up` between -limit and limit, in place of
// the gate. What is NaN stays NaN.
inline void clamped_gate_up(float* gate, const float* up, int n, float limit, float alpha) {
  for (int i = 0; i < n; i += kWidth) {
    f32v g = load_first(gate + i, n - i), u = load_first(up + i, n - i);
    g = g > limit ? splat(limit) : g;
    u = u > limit ? splat(limit) : u;
    u = u < -limit ? splat(-limit) : u;
    store_first(gate + i, (u + 1.0f) * (g / (1.0f + exp(-alpha * g))), n - i);
  }
}

inline void silu(float* x, int n) {
  for (int i = 0; i < n; i += kWidth) {
    const f32v v = load_first(x + i, n - i);
    store_first(x + i, v / (1.0f + exp(-v)), n - i);
  }
}

inline void relu(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] > 0 ? x[i] : 0.0f;
}

inline void gelu(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] *= 0.5f * (1.0f + std::erf(x[i] * 0.70710678f));
}

// GELU's approximation by tanh.
inline void gelu_tanh(float* x, int n) {
  for (int i = 0; i < n; i += kWidth) {
    const f32v v = load_first(x + i, n - i);
    store_first(x + i, 0.5f * v * (1.0f + tanh(0.7978845608f * (v + 0.044715f * v * v * v))), n - i);
  }
}

inline void multiply(float* x, const float* by, int n) {
  for (int i = 0; i < n; ++i) x[i] *= by[i];
}

// Writes the lowest id of those with the highest logit. Writes -1 if there is no such token: a logit is NaN, which no
// comparison finds, or +inf, or all are -inf.
inline void choose(const float* logits, int n, int64_t* best) {
  int at = 0;
  float top = logits[0];
  int32_t lacks = 0;
  int i = 0;
  if (n >= 2 * kWidth) {
    f32v tops = load<f32v>(logits);
    i32v nans = tops != tops;
    for (i = kWidth; i + kWidth <= n; i += kWidth) {
      const f32v x = load<f32v>(logits + i);
      nans |= x != x;
      tops = max(tops, x);
    }
    for (int lane = 0; lane < kWidth; ++lane) lacks |= nans[lane];
    top = largest(tops);
    while (!lacks && logits[at] != top) ++at;
  }
  for (; i < n; ++i) {
    lacks |= logits[i] != logits[i];
    if (logits[i] > top) top = logits[i], at = i;
  }
  *best = lacks || !std::isfinite(top) ? -1 : at;
}

}  // namespace farsight
