// Products and reads, timed from outside: benchmarks/kernels/products.py.
#include <vector>

#include "interface.h"
#include "parts.h"

using namespace farsight;

extern "C" {

void* fs_team(int threads) { return new Team(threads); }

void fs_dismiss(void* team) { delete static_cast<Team*>(team); }

// A matrix [n, k] that copies `weight`, or the integers of `quantized` where there are any.
void* fs_matrix(const FsQuantized* quantized, const void* weight, int bf16, int n, int k) {
  const FsLinear from{weight, nullptr, n, k, quantized, quantized ? 1 : 0};
  return (quantized ? make_quantized(from) : make_dense(bf16, from)).release();
}

void fs_free(void* matrix) { delete static_cast<Linear*>(matrix); }

// `rows[i]` inputs, `row_length` floats apart, times each of the matrices, as a step does it: rounded, then multiplied.
void fs_products(void* of, void* const* matrices, const int* rows, int count, const float* x, int row_length, float* out) {
  Team& team = *static_cast<Team*>(of);
  static std::vector<uint32_t> packed;
  for (int i = 0; i < count; ++i) {
    const Linear& matrix = *static_cast<const Linear*>(matrices[i]);
    if (packed.size() < size_t(rows[i]) * matrix.stride) packed.resize(size_t(rows[i]) * matrix.stride);
    team.share_ranges(rows[i], [&](int begin, int end) {
      for (int row = begin; row < end; ++row)
        matrix.pack(x + size_t(row) * row_length, packed.data() + size_t(row) * matrix.stride);
    });
    apply(team, matrix, packed.data(), rows[i], out, false);
  }
}

// Reads whole blocks of 256 bytes; the sum of what is there keeps the reads.
uint32_t fs_read(void* of, const uint8_t* bytes, int64_t count) {
  constexpr int kParts = 256;
  Team& team = *static_cast<Team*>(of);
  std::vector<uint32_t> sums(kParts);
  const int64_t blocks = count / 256;
  team.share(kParts, [&](int part) {
    u32v sum[4] = {};
    for (int64_t i = blocks * part / kParts; i < blocks * (part + 1) / kParts; ++i)
      for (int v = 0; v < 256; v += 4 * kWidth) sum[v / (4 * kWidth) % 4] += load<u32v>(bytes + 256 * i + v);
    const u32v all = sum[0] + sum[1] + sum[2] + sum[3];
    for (int lane = 0; lane < kWidth; ++lane) sums[part] += all[lane];
  });
  uint32_t total = 0;
  for (const uint32_t sum : sums) total += sum;
  return total;
}
}
