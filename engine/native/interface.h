// The arguments of the compiled step, as engine/native/model.py lays them out. Pointers stay valid as long as the model,
// those of FsStep as long as the call.
#pragma once

#include <cstdint>

extern "C" {

struct FsConfig {
  int32_t bf16, num_layers, hidden, intermediate, vocab, heads, kv_heads, head_dim, block_size;
  int32_t rotary_dim, layer_norm, activation, num_threads;
  int32_t kv_int8;  // keys and values in 8 bits (kv_int8.h); 0: in the model's type
  float norm_eps;
  const float* cos;  // [positions, rotary_dim / 2], or none
  const float* sin;
  const void* embedding;  // [vocab, hidden], in the model's type; stays where it is
  const void* positions;  // [n, hidden], or none
};

// FsConfig.activation
enum { kSilu = 0, kRelu = 1, kGelu = 2 };  // silu is gated

// Weights in 8 or 4 bits (engine/checkpoint/quantized.py); copied.
struct FsQuantized {
  const void* values;    // 8 bits: int8 [n, k]; 4 bits: uint8 [n, k / 2], the first of two in the lower half
  const float* scales;   // [n, k / group]
  const float* minima;   // the same, or none
  int32_t n, k, bits, group;
};

struct FsLinear {
  const void* weight;  // [n, k], in the model's type; copied. None if there are parts
  const float* bias;   // [n], or none; stays where it is
  int32_t n, k;
  const FsQuantized* parts;  // one below the other: all but the last have whole panels of 64 outputs
  int32_t num_parts;
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
