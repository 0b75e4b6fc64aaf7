// One product through a part of the compiled step, for any processor that the compiler can be told to build for.
#include "quantized_linear.cpp"

using namespace farsight;

extern "C" {

// out[m, n] (+)= x[m, k] times the weights, in calls of `rows` rows and on `threads` threads.
void probe(const FsQuantized* parts, int count, const float* bias, const float* x, int m, int rows, int threads, int add,
           float* out) {
  const QuantizedLinear linear(parts, count, bias);
  Team team(threads);
  std::vector<uint32_t> packed(size_t(m) * linear.stride, 0xffffffffu);
  for (int r = 0; r < m; ++r) linear.pack(x + size_t(r) * linear.k, packed.data() + size_t(r) * linear.stride);
  for (int r = 0; r < m; r += rows)
    apply(team, linear, packed.data() + size_t(r) * linear.stride, std::min(rows, m - r), out + size_t(r) * linear.n,
          add);
}

// How the scales are kept: 0 float32, 1 bfloat16, 2 half, 3 codes.
int probe_scales(const FsQuantized* weights) { return smallest_type(*weights); }
}
