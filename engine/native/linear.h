// Matrix products: activations [m, k] in lanes times weights that were packed once, into float32 [m, n].
//
// Each output is one chain of `T::fma` over the lanes of k, in their order, from 0; then the bias is added, then what
// the output is added to. Tiles of every height and threads keep to that, so a row's outputs do not depend on the rows
// it is computed with. Never split the sum over k: what runs beside a chain is the chain of another output.
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

namespace farsight {

constexpr int kPanel = 64;       // columns that are computed together: 4 vectors
constexpr int kMaxRows = 6;      // rows of a tile: 6 x 4 sums and 4 weights fill the 32 registers of AVX-512
constexpr int kChunkBytes = 128 * 1024;  // of activations that stay in the second-level cache

// y = x W^T + bias. The weights lie in panels of kPanel columns: [panels][lanes of k][kPanel] lanes.
struct Linear {
  int n = 0, k = 0, lanes = 0, panels = 0;
  std::vector<uint32_t> weight;
  const float* bias = nullptr;  // or none

  const uint32_t* panel(int p) const { return weight.data() + size_t(p) * lanes * kPanel; }
};

// Packs [n, k], row by row.
template <class T>
void pack_linear(Linear& linear, const typename T::Element* rows, const float* bias, int n, int k) {
  linear.n = n;
  linear.k = k;
  linear.lanes = (k + T::kPerLane - 1) / T::kPerLane;
  linear.panels = (n + kPanel - 1) / kPanel;
  linear.bias = bias;
  linear.weight.assign(size_t(linear.panels) * linear.lanes * kPanel, 0);
  auto* packed = reinterpret_cast<typename T::Element*>(linear.weight.data());
  for (int row = 0; row < n; ++row) {
    const size_t column = size_t(row / kPanel) * linear.lanes * kPanel + row % kPanel;
    for (int i = 0; i < k; ++i) {
      const size_t lane = column + size_t(i / T::kPerLane) * kPanel;
      packed[lane * T::kPerLane + i % T::kPerLane] = rows[size_t(row) * k + i];
    }
  }
}

// Sums of a tile of R rows over one panel.
template <class T, int R>
inline void tile(const uint32_t* a, size_t stride, const uint32_t* weight, int lanes, f32v (&sums)[R][4]) {
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 4; ++j) sums[r][j] = f32v{};
  for (int k = 0; k < lanes; ++k) {
    const uint32_t* w = weight + size_t(k) * kPanel;
    const f32v w0 = load<f32v>(w), w1 = load<f32v>(w + 16), w2 = load<f32v>(w + 32), w3 = load<f32v>(w + 48);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const uint32_t x = a[r * stride + k];
      sums[r][0] = T::fma(sums[r][0], x, w0);
      sums[r][1] = T::fma(sums[r][1], x, w1);
      sums[r][2] = T::fma(sums[r][2], x, w2);
      sums[r][3] = T::fma(sums[r][3], x, w3);
    }
  }
}

// One tile into out[row][n]; adds to what is there if asked to.
template <class T, int R>
inline void finish_tile(const Linear& linear, int p, const uint32_t* a, float* out, bool add) {
  f32v sums[R][4];
  tile<T, R>(a, linear.lanes, linear.panel(p), linear.lanes, sums);
  const int first = p * kPanel, width = std::min(kPanel, linear.n - first);
  for (int r = 0; r < R; ++r) {
    float* to = out + size_t(r) * linear.n + first;
    if (width == kPanel) {
      for (int j = 0; j < 4; ++j) {
        f32v v = sums[r][j];
        if (linear.bias) v += load<f32v>(linear.bias + first + 16 * j);
        if (add) v += load<f32v>(to + 16 * j);
        store(to + 16 * j, v);
      }
      continue;
    }
    for (int i = 0; i < width; ++i) {
      float v = sums[r][i / kWidth][i % kWidth];
      if (linear.bias) v += linear.bias[first + i];
      to[i] = add ? to[i] + v : v;
    }
  }
}

template <class T>
inline void finish_rows(const Linear& linear, int p, const uint32_t* a, int rows, float* out, bool add) {
  switch (rows) {
    case 1: return finish_tile<T, 1>(linear, p, a, out, add);
    case 2: return finish_tile<T, 2>(linear, p, a, out, add);
    case 3: return finish_tile<T, 3>(linear, p, a, out, add);
    case 4: return finish_tile<T, 4>(linear, p, a, out, add);
    case 5: return finish_tile<T, 5>(linear, p, a, out, add);
    default: return finish_tile<T, 6>(linear, p, a, out, add);
  }
}

// out[m, n] = (or +=) a[m, lanes] times the weights. Panels are shared among the threads.
template <class T>
void apply(const Linear& linear, const uint32_t* a, int m, float* out, bool add, int num_threads) {
  const int fitting = std::max(1, kChunkBytes / (linear.lanes * 4 * kMaxRows)) * kMaxRows;
  for (int first = 0; first < m; first += fitting) {
    const int rows = std::min(fitting, m - first);
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;  // of nearly equal height
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int p = 0; p < linear.panels; ++p) {
      for (int t = 0; t < tiles; ++t) {
        const int begin = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
        finish_rows<T>(linear, p, a + size_t(begin) * linear.lanes, end - begin, out + size_t(begin) * linear.n, add);
      }
    }
  }
}

}  // namespace farsight
