// A matrix product with weights in the model's type.
//
// Each output is one chain of multiply-adds over the lanes of k, in their order, from 0; then the bias is added, then what
// the output is added to. Tiles of every height keep to that.
#include <vector>

#include "lanes.h"
#include "parts.h"

namespace farsight {

namespace {

constexpr int kLanesTogether = 64;  // 16 KiB of a panel

// The weights lie in panels of kPanel columns: [panels][lanes of k][kPanel] lanes.
template <class T>
class DenseLinear final : public Linear {
 public:
  typedef typename T::Element Element;

  // Copies the weights [n, k]; the bias [n], which may be none, stays where it is.
  DenseLinear(const Element* rows, const float* bias, int n, int k)
      : Linear(n, k, input_words<T>(k)), lanes_((k + T::kPerLane - 1) / T::kPerLane), bias_(bias) {
    weight_.assign(size_t(panels) * lanes_ * kPanel, 0);
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
    for (int t = 0; t < tiles; ++t) {
      const int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      const uint32_t* a = packed + size_t(begin) * stride;
      float* to = out + size_t(begin) * n;
      const Ahead ahead(bytes(p), next < 0 ? nullptr : bytes(next), t, tiles);
      switch (end - begin) {
        case 1: finish_tile<1>(p, a, to, add, ahead); break;
        case 2: finish_tile<2>(p, a, to, add, ahead); break;
        case 3: finish_tile<3>(p, a, to, add, ahead); break;
        case 4: finish_tile<4>(p, a, to, add, ahead); break;
        case 5: finish_tile<5>(p, a, to, add, ahead); break;
        default: finish_tile<6>(p, a, to, add, ahead);
      }
    }
  }

 private:
  const uint8_t* bytes(int p) const {
    return reinterpret_cast<const uint8_t*>(weight_.data() + size_t(p) * lanes_ * kPanel);
  }

  // Sums of a tile of R rows over one panel. As many of its vectors are computed together as the registers hold, and
  // where these are not all, they take turns with what the first-level cache holds of the panel.
  template <int R>
  void sum_tile(int p, const uint32_t* a, const Ahead& ahead, f32v (&sums)[R][kVectors]) const {
    constexpr int V = vectors_together(R, kVectors);
    const uint32_t* weight = weight_.data() + size_t(p) * lanes_ * kPanel;
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < kVectors; ++j) sums[r][j] = f32v{};
    const int fitting = V == kVectors ? lanes_ : kLanesTogether;
    for (int first = 0; first < lanes_; first += fitting) {
      const int end = std::min(lanes_, first + fitting);
      for (int j = 0; j < kVectors; j += V) {
        f32v acc[R][V];
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) acc[r][v] = sums[r][j + v];
        for (int lane = first; lane < end; ++lane) {
          const uint32_t* w = weight + size_t(lane) * kPanel;
          if (j == 0) ahead.step(w);
          add_products<T, true>(acc, w + j * kWidth, [&](int r) { return a + size_t(r) * stride + lane * T::kSteps; });
        }
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) sums[r][j + v] = acc[r][v];
      }
    }
  }

  template <int R>
  void finish_tile(int p, const uint32_t* a, float* out, bool add, const Ahead& ahead) const {
    f32v sums[R][kVectors];
    sum_tile<R>(p, a, ahead, sums);
    finish_panel<R>(*this, p, bias_, sums, out, add);
  }

  const int lanes_;
  std::vector<uint32_t> weight_;
  const float* bias_;
};

}  // namespace

std::unique_ptr<Linear> make_dense(bool bf16, const FsLinear& from) {
  if (bf16)
    return std::make_unique<DenseLinear<Bf16>>(static_cast<const uint16_t*>(from.weight), from.bias, from.n, from.k);
  return std::make_unique<DenseLinear<F32>>(static_cast<const float*>(from.weight), from.bias, from.n, from.k);
}

}  // namespace farsight
