// The arguments of the compiled step, as engine/native/model.py lays them out. Pointers stay valid as long as the model,
// those of FsStep as long as the call.
#pragma once

#include <cstdint>

extern "C" {

struct FsConfig {
  int32_t bf16, num_layers, hidden, intermediate, vocab, heads, kv_heads, head_dim, block_size;
  int32_t rotary_dim, layer_norm, activation, num_threads;
  float norm_eps;
  const float* cos;  // [positions, rotary_dim / 2], or none
  const float* sin;
  const void* embedding;  // [vocab, hidden], in the model's type; stays where it is
  const void* positions;  // [n, hidden], or none
};

// FsConfig.activation
enum { kSilu = 0, kRelu = 1, kGelu = 2 };  // silu is gated

struct FsLinear {
  const void* weight;  // [n, k], in the model's type; copied
  const float* bias;   // or none; stays where it is
  int32_t n, k;
};

struct FsNorm {
  const float* weight;  // none: no norm
  const float* bias;
};

struct FsLayer {
  FsNorm input_norm, post_norm;
  const float* q_norm;  // or none
  const float* k_norm;
  FsLinear qkv, out, up, down;
  int32_t window;  // 0: none
  void* keys;
  void* values;
};

struct FsStep {
  int32_t num_rows, num_items, num_samples;
  const int64_t* token_ids;    // [rows]
  const int64_t* positions;    // [rows]
  const int64_t* slot_ids;     // [rows]
  const int32_t* lengths;      // [items, 2]: queries, tokens with them
  const int32_t* tables;       // [items, width]
  int32_t width;
  const int64_t* sample_rows;  // ascending
  float* logits;               // [samples, vocab]
  int64_t* best;               // [samples]
};
}
