// A matrix product with weights in the model's type.
//
// Each output is one chain of multiply-adds over the lanes of k, in their order, from 0; then the bias is added, then what
// the output is added to. Tiles of every height keep to that.
//
// Tiles that share a panel go through a part of its lanes one after the other, which stays in the first-level cache; their
// sums wait on the stack until they come to the next part.
#include <algorithm>

#include "bytes.h"
#include "dense_tiles.h"
#include "lanes.h"
#include "parts.h"

namespace farsight {

namespace {

constexpr int kLanesTogether = 64;  // 16 KiB of a panel
constexpr int kTilesTogether = 16;  // whose sums, 24 KiB, wait

// The weights lie in panels of kPanel columns: [panels][lanes of k][kPanel] lanes.
template <class T>
class DenseLinear final : public Linear {
 public:
  typedef typename T::Element Element;

  // Copies the weights [n, k]; the bias [n], which may be none, stays where it is.
  DenseLinear(const Element* rows, const float* bias, int n, int k)
      : Linear(n, k, spread_stride(input_words<T>(k))), lanes_((k + T::kPerLane - 1) / T::kPerLane), bias_(bias) {
    weight_.resize(size_t(panels) * lanes_ * kPanel * sizeof(uint32_t));
    auto* packed = reinterpret_cast<Element*>(weight_.data());
    for (int row = 0; row < n; ++row) {
      const size_t column = size_t(row / kPanel) * lanes_ * kPanel + row % kPanel;
      for (int i = 0; i < k; ++i) {
        const size_t lane = column + size_t(i / T::kPerLane) * kPanel;
        packed[lane * T::kPerLane + i % T::kPerLane] = rows[size_t(row) * k + i];
      }
    }
  }

  void pack(const float* row, uint32_t* to) const override { pack_inputs<T>(row, k, to); }

  void multiply(int p, const uint32_t* packed, int rows, float* out, bool add, int next) const override {
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;  // of nearly equal height
    const bool whole = tiles == 1 && vectors_together(rows, kVectors) == kVectors;
    const int fitting = whole ? lanes_ : kLanesTogether;
    const auto row_of = [&](int tile) { return int(int64_t(rows) * tile / tiles); };
    alignas(64) f32v sums[kTilesTogether * kMaxRows][kVectors];
    for (int first = 0; first < tiles; first += kTilesTogether) {
      const int last = std::min(tiles, first + kTilesTogether), begin = row_of(first);
      for (int lane = 0; lane < lanes_; lane += fitting) {
        const int lanes = std::min(fitting, lanes_ - lane);
        const uint8_t* here = panel(p) + size_t(lane) * kPanel * sizeof(uint32_t);
        const uint8_t* following = lane + lanes < lanes_ ? here + size_t(lanes) * kPanel * sizeof(uint32_t)
                                   : next < 0            ? nullptr
                                                         : panel(next);
        for (int t = first; t < last; ++t) {
          const Ahead ahead(here, following, t, tiles);
          const uint32_t* a = packed + size_t(row_of(t)) * stride + lane * T::kSteps;
          add_tile(row_of(t + 1) - row_of(t), reinterpret_cast<const uint32_t*>(here), lanes, a, lane == 0,
                   sums + (row_of(t) - begin), ahead);
        }
      }
      finish_panel(*this, p, bias_, sums, row_of(last) - begin, out + size_t(begin) * n, add);
    }
  }

 private:
  const uint8_t* panel(int p) const { return weight_.data() + size_t(p) * lanes_ * kPanel * sizeof(uint32_t); }

  void add_tile(int rows, const uint32_t* weight, int lanes, const uint32_t* a, bool fresh, f32v (*sums)[kVectors],
                const Ahead& ahead) const {
    switch (rows) {
      case 1: return add_rows<1>(weight, lanes, a, fresh, sums, ahead);
      case 2: return add_rows<2>(weight, lanes, a, fresh, sums, ahead);
      case 3: return add_rows<3>(weight, lanes, a, fresh, sums, ahead);
      case 4: return add_rows<4>(weight, lanes, a, fresh, sums, ahead);
      case 5: return add_rows<5>(weight, lanes, a, fresh, sums, ahead);
      default: return add_rows<6>(weight, lanes, a, fresh, sums, ahead);
    }
  }

  // Adds the products of some lanes of a panel to the sums of a tile of R rows; `fresh` ones begin at 0. As many of its
  // vectors are computed together as the registers hold.
  template <int R>
  __attribute__((noinline)) void add_rows(const uint32_t* weight, int lanes, const uint32_t* a, bool fresh,
                                          f32v (*sums)[kVectors], const Ahead& ahead) const {
    constexpr int V = vectors_together(R, kVectors);
    for (int j = 0; j < kVectors; j += V) {
      f32v acc[R][V] = {};
      if (!fresh) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
          for (int v = 0; v < V; ++v) acc[r][v] = sums[r][j + v];
      }
      for (int lane = 0; lane < lanes; ++lane) {
        const uint32_t* w = weight + size_t(lane) * kPanel;
        if (j == 0) ahead.step(w);
        add_products<T, true>(acc, w + j * kWidth, [&](int r) { return a + size_t(r) * stride + lane * T::kSteps; });
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sums[r][j + v] = acc[r][v];
    }
  }

  const int lanes_;
  Bytes weight_;
  const float* bias_;
};

}  // namespace

std::unique_ptr<Linear> make_dense(bool bf16, const FsLinear& from) {
#ifdef __AMX_BF16__
  if (bf16 && has_tiles())
    return std::make_unique<TileLinear>(static_cast<const uint16_t*>(from.weight), from.bias, from.n, from.k);
#endif
  if (bf16)
    return std::make_unique<DenseLinear<Bf16>>(static_cast<const uint16_t*>(from.weight), from.bias, from.n, from.k);
  return std::make_unique<DenseLinear<F32>>(static_cast<const float*>(from.weight), from.bias, from.n, from.k);
}

}  // namespace farsight

// Whether products in bfloat16 go by tiles, in their order.
extern "C" int32_t fs_has_tiles() {
#ifdef __AMX_BF16__
  return farsight::has_tiles();
#else
  return 0;
#endif
}
