// What a matrix product is to a step: y = x W^T + bias, whatever the format of the weights.
//
// A format derives from Linear in a file of its own (dense.cpp: weights in the model's type). It says how an input row
// is rounded and laid out, and computes panels of outputs; `apply` shares the panels among the threads.
//
// Each output is one chain of roundings that depends on its own row alone: not on the rows that are computed with it,
// not on the panel's thread, not on how rows are cut (ADR 27). Never split the sum over k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lanes.h"
#include "team.h"

namespace farsight {

constexpr int kPanel = 64;               // outputs whose weights lie together
constexpr int kVectors = kPanel / kWidth;
constexpr int kMaxRows = 6;              // rows of a tile: their sums, 4 or 2 vectors each, fill 32 or 16 registers
constexpr int kChunkBytes = 512 * 1024;  // most packed input of a task: with a panel it fits the second-level cache

// Words between packed rows. Those of a tile that lay whole pages apart would take each other's place in the first-level
// cache.
inline int spread_stride(int words) { return words % 512 == 0 ? words + 16 : words; }

// Brings the next panel into the second-level cache while the tiles of a panel compute. For each 256 bytes of the panel
// that it reads, a tile reads two lines ahead: the first tile the first two, the second tile the others. A single tile, or
// the first one where the next panel is not known, reads all four, at a fixed distance: between two lines it has so many
// instructions that the processor, which sees a few hundred of them at once, would wait for one line after the other.
class Ahead {
 public:
  // For tile `t` of `tiles` of the panel at `here`; the next panel is at `next`, or there is none.
  Ahead(const uint8_t* here, const uint8_t* next, int t, int tiles) : is_whole_(tiles == 1 || (t == 0 && !next)) {
    if (is_whole_)
      distance_ = kDistance;
    else if (next && t < 2)
      distance_ = uintptr_t(next) - uintptr_t(here) + 128 * t;
  }

  // To be called when the tile reads the 256 bytes at `from`.
  void step(const void* from) const {
    const uintptr_t line = uintptr_t(from) + distance_;
    read_ahead(reinterpret_cast<const void*>(line));
    read_ahead(reinterpret_cast<const void*>(line + 64));
    if (!is_whole_) return;
    read_ahead(reinterpret_cast<const void*>(line + 128));
    read_ahead(reinterpret_cast<const void*>(line + 192));
  }

 private:
  static constexpr uintptr_t kDistance = 4096;

  const bool is_whole_;
  uintptr_t distance_ = 0;
};

class Linear {
 public:
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  const int n;       // outputs
  const int k;       // inputs
  const int stride;  // 32-bit words of a packed input row
  const int panels;  // of kPanel outputs, the last one perhaps fewer

  // Rounds one input row [k] and lays it out in `stride` words.
  virtual void pack(const float* row, uint32_t* to) const = 0;

  // The outputs of panel p for `rows` packed rows, into out[row * n + column]; adds to what is there if asked to. Reads
  // ahead the weights of panel `next`; -1: of none.
  virtual void multiply(int p, const uint32_t* packed, int rows, float* out, bool add, int next) const = 0;

 protected:
  Linear(int n, int k, int stride) : n(n), k(k), stride(stride), panels((n + kPanel - 1) / kPanel) {}
};

// Writes the sums of `rows` rows of panel p to out[row * n + column], with the bias (or none), then with what is there if
// asked to.
inline void finish_panel(const Linear& linear, int p, const float* bias, f32v (*sums)[kVectors], int rows, float* out,
                         bool add) {
  const int first = p * kPanel, width = std::min(kPanel, linear.n - first);
  for (int r = 0; r < rows; ++r) {
    float* to = out + size_t(r) * linear.n + first;
    if (width == kPanel) {
      for (int j = 0; j < kVectors; ++j) {
        f32v v = sums[r][j];
        if (bias) v += load<f32v>(bias + first + kWidth * j);
        if (add) v += load<f32v>(to + kWidth * j);
        store(to + kWidth * j, v);
      }
      continue;
    }
    for (int i = 0; i < width; ++i) {
      float v = sums[r][i / kWidth][i % kWidth];
      if (bias) v += bias[first + i];
      to[i] = add ? to[i] + v : v;
    }
  }
}

// The part of the threads' time in which some have no task left, where all tasks take as long.
inline double idle_share(int tasks, int threads) {
  const int rounds = (tasks + threads - 1) / threads;
  return 1.0 - double(tasks) / (rounds * threads);
}

// out[rows, n] = (or +=) the product of packed rows, for the panels first .. last. Where the rows are cut into chunks, all
// chunks of a panel follow each other: a panel comes from memory once, and the rows stay in the caches, which are larger
// than the rows and smaller than the weights.
inline void apply(Team& team, const Linear& linear, const uint32_t* packed, int rows, float* out, bool add, int first,
                  int last) {
  if (rows == 0) return;
  const int fitting = std::max(1, kChunkBytes / (linear.stride * 4 * kMaxRows)) * kMaxRows;
  const int panels = last - first;
  int chunks = (rows + fitting - 1) / fitting;
  // So few panels that some threads would wait for the others: each panel is cut into several tasks.
  while (chunks * panels < 3 * team.size() && rows >= 2 * kMaxRows * chunks) ++chunks;
  if (idle_share(chunks * panels, team.size()) > 0.05 && rows >= 4 * kMaxRows * chunks) ++chunks;
  team.share(chunks * panels, [&](int task) {
    const int chunk = task % chunks, panel = first + task / chunks;
    const int begin = int(int64_t(rows) * chunk / chunks), end = int(int64_t(rows) * (chunk + 1) / chunks);
    // Three threads keep the memory busy by themselves, and none of them knows which panel it will claim.
    const int next = team.size() == 1 && chunk + 1 == chunks && panel + 1 < last ? panel + 1 : -1;
    linear.multiply(panel, packed + size_t(begin) * linear.stride, end - begin, out + size_t(begin) * linear.n, add,
                    next);
  });
}

inline void apply(Team& team, const Linear& linear, const uint32_t* packed, int rows, float* out, bool add) {
  apply(team, linear, packed, rows, out, add, 0, linear.panels);
}

}  // namespace farsight
