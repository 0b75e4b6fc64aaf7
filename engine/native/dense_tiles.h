// A matrix product with weights in bfloat16 by AMX, whose registers are tiles: 16 rows of 32 inputs times 16 outputs.
//
// Each output is one sequence of roundings, as TDPBF16PS has it: of each 32 terms of k, in their order, the chain of the
// even ones and the chain of the odd ones, each from 0, are added to each other, then to the sum so far, from 0. All rows
// go this way, whatever their number (ADR 27). Subnormal numbers count as 0.
#pragma once

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "bytes.h"
#include "lanes.h"
#include "linear.h"

namespace farsight {

// Whether the system lets this process use tiles: it has to be asked once.
inline bool has_tiles() {
  constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA of Linux
  static const bool granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return granted;
}

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The weights lie in panels as in dense.cpp, with lanes of k up to a multiple of 16: [panels][lanes][kPanel] lanes.
class TileLinear final : public Linear {
 public:
  TileLinear(const uint16_t* rows, const float* bias, int n, int k)
      : Linear(n, k, spread_stride(whole_lanes(k))), lanes_(whole_lanes(k)), bias_(bias) {
    weight_.resize(size_t(panels) * lanes_ * kPanel * sizeof(uint32_t));
    auto* packed = reinterpret_cast<uint16_t*>(weight_.data());
    for (int row = 0; row < n; ++row) {
      const size_t column = size_t(row / kPanel) * lanes_ * kPanel + row % kPanel;
      for (int i = 0; i < k; ++i) packed[(column + size_t(i / 2) * kPanel) * 2 + i % 2] = rows[size_t(row) * k + i];
    }
  }

  void pack(const float* row, uint32_t* to) const override {
    farsight::pack<Bf16>(row, k, to);
    auto* values = reinterpret_cast<uint16_t*>(to);
    std::fill(values + k, values + 2 * lanes_, uint16_t(0));
  }

  void multiply(int p, const uint32_t* packed, int rows, float* out, bool add, int) const override {
    alignas(64) f32v sums[kTileRows][kVectors];
    const auto* weight = reinterpret_cast<const uint32_t*>(weight_.data()) + size_t(p) * lanes_ * kPanel;
    int shaped = 0;
    for (int begin = 0; begin < rows; begin += kTileRows) {
      const int count = std::min(kTileRows, rows - begin);
      if (count != shaped) shape_tiles(shaped = count);
      multiply_tile(weight, packed + size_t(begin) * stride, sums);
      finish_panel(*this, p, bias_, sums, count, out + size_t(begin) * n, add);
    }
    _tile_release();  // a thread whose tiles are in use is slower to switch
  }

 private:
  static constexpr int kTileRows = 16, kTileLanes = 16, kStep = kPanel * 4;
  static_assert(kWidth == 16, "a tile has the width of a vector");

  static int whole_lanes(int k) { return ((k + 1) / 2 + kTileLanes - 1) / kTileLanes * kTileLanes; }

  // Tiles 0 .. 3 hold sums of `rows` rows, tile 4 their inputs, the others weights.
  static void shape_tiles(int rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = uint8_t(tile <= 4 ? rows : kTileLanes);
      shapes.row_bytes[tile] = 64;
    }
    __asm__ volatile("" ::: "memory");  // GCC's intrinsic says that it reads the first bytes alone
    _tile_loadconfig(&shapes);
  }

  void multiply_tile(const uint32_t* weight, const uint32_t* a, f32v (*sums)[kVectors]) const {
    const long row_bytes = long(stride) * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int lane = 0; lane < lanes_; lane += kTileLanes) {
      const uint32_t* w = weight + size_t(lane) * kPanel;
      _tile_loadd(4, a + lane, row_bytes);
      _tile_loadd(5, w, kStep);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + kWidth, kStep);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, w + 2 * kWidth, kStep);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 3 * kWidth, kStep);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, &sums[0][0], kStep);
    _tile_stored(1, &sums[0][1], kStep);
    _tile_stored(2, &sums[0][2], kStep);
    _tile_stored(3, &sums[0][3], kStep);
  }

  const int lanes_;
  Bytes weight_;
  const float* bias_;
};

}  // namespace farsight

#endif
