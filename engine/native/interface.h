// The arguments of the compiled step, as engine/native/model.py lays them out. Pointers stay valid as long as the model,
// those of FsStep as long as the call.
#pragma once

#include <cstdint>

extern "C" {

struct FsNorm {
  const float* weight;  // none: no norm
  const float* bias;
};

struct FsConfig {
  int32_t bf16, num_layers, hidden, intermediate, vocab, heads, kv_heads, head_dim, block_size;
  int32_t layer_norm, activation, num_threads;
  int32_t kv_int8;   // keys and values in 8 bits (kv_int8.h); 0: in the model's type
  int32_t gated;     // the MLP multiplies its activated half with the other one
  int32_t parallel;  // attention and MLP read the layer's input; 0: the MLP reads what attention has added to
  int32_t row_norm;  // q_norm and k_norm are of all heads as one row; 0: of each head
  int32_t latent;    // values of a latent: the last ones of the row that all heads read; 0: keys and values are apart
  float norm_eps, embedding_scale, residual_scale, logit_scale;
  float attention_scale;           // 0: 1 / sqrt(head_dim)
  float attention_cap, logit_cap;  // of a soft cap; 0: none
  float gate_limit, gate_alpha;    // a gated MLP is cut at the limit (rows.h); 0: it is not
  const float* slopes;             // of ALiBi, [heads], or none
  const void* embedding;           // [vocab, hidden], in the model's type; stays where it is
  const void* positions;           // [n, hidden], or none
  FsNorm embedding_norm;
  const float* query_scales;  // [positions]: factors of queries, or none
  float* states;              // of a sequence each: [rows, state_size], or none
  int64_t state_size;
};

// FsConfig.activation
enum { kSilu = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3 };

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

// What every layer gets of a token beside the residual stream.
struct FsInputs {
  const void* embedding;  // [vocab, layers * width], in the model's type; stays where it is
  FsLinear projection;    // of the embeddings of the stream
  const float* norm;      // [width]
  int32_t width;
  float scale;            // of the embeddings
};

// A mixture of experts in place of an MLP.
struct FsExperts {
  int32_t count, active;  // 0: the layer has none
  int32_t normalized;     // the weights of a row's experts are divided by their sum
  int32_t shared_gate;    // the router's last output is the gate of `up` and `down` of the layer
  int32_t sigmoid;        // scores are sigmoids; 0: a softmax
  int32_t groups, active_groups, group_best;  // as of Experts (engine/checkpoint/families/record.py); 1, 1, 1: all are one
  float scale;            // of the weights
  const float* correction;  // added to the scores for the choice, [count], or none
  FsLinear router;
  const FsLinear* up;     // [count]
  const FsLinear* down;
  const float* router_norm;       // beside an MLP: of the router's input, [hidden]; none: in place of an MLP
  const float* scales;            // of the weights of each expert, [count]
  FsNorm before, after_mlp, after;  // of the experts' input, of what the MLP gives, of what the experts give
};

// FsMixer.kind
enum { kAttention = 0, kShortConvolution = 1, kDelta = 2 };

// What a layer has in place of attention; names and layouts as in engine/checkpoint/layers.py.
struct FsMixer {
  int32_t kind, length, convolved, mixed;
  int32_t key_heads, value_heads, key, value;
  int32_t tiled;      // value head i shares the key head i modulo their number, not i over the share of each
  const float* taps;  // [length, convolved]
  const float* bias;  // [convolved], or none
  const float *rates, *steps, *norm;
  int64_t first;      // of the layer's values in the state of a sequence
};

// Latent attention: the first matrix of a layer makes queries or their latent, then the row of a token.
struct FsLatent {
  const float* q_norm;    // [inputs of q_up]
  const float* kv_norm;   // [latent]
  FsLinear q_up;          // or none
  FsLinear keys, values;  // those of the first head; copied. That of the keys lies as [k, n]
  int32_t head_stride;    // from a head's values to those of the next one
};

struct FsLayer {
  FsNorm input_norm, post_norm;
  FsNorm after_attention, after_mlp;  // of what they add
  const float* q_norm;                // or none
  const float* k_norm;
  FsLinear qkv, out, up, down;  // with experts: up and down of those that every row takes, or none
  const float* cos;  // [positions, rotary_dim / 2], or none
  const float* sin;
  int32_t rotary_dim;
  int32_t window;  // 0: none
  void* keys;
  void* values;
  const float* sinks;  // scores that take part in the softmax, [heads], or none
  FsExperts experts;
  FsLatent latent;
  FsMixer mixer;
  int32_t head_dim, kv_heads;
  int32_t keeps_kv;      // 0: keys and values are those of an earlier layer, and the first matrix makes queries alone
  int32_t gated;         // attention: the first matrix makes a gate behind the values for each value of the heads
  const float* v_norm;   // of each value, [head_dim], or none
  FsLinear inputs_gate, inputs_out;  // of what the layer gets beside the stream, or none
  FsNorm inputs_norm;
  float scale;           // of the stream at the layer's end
};

struct FsStep {
  int32_t num_rows, num_items, num_samples;
  const int64_t* token_ids;    // [rows]
  const int64_t* positions;    // [rows]
  const int64_t* slot_ids;     // [rows]
  const int32_t* lengths;      // [items, 2]: queries, tokens with them
  const int32_t* tables;       // [items, width]
  int32_t width;
  const int32_t* state_rows;   // [items], or none
  const int32_t* state_keeps;  // [keeps, 3], ascending: item, its rows behind which its state is kept, in which row
  int32_t num_keeps;
  const int64_t* sample_rows;  // ascending
  float* logits;               // [samples, vocab]
  int64_t* best;               // [samples]
  float* hidden;               // [samples, hidden]: what the last norm reads, or none
  float* middle;               // [samples, hidden]: the same rows behind half of the layers, or none
  const int32_t* given_of;     // [rows]: which given row each is, -1 for that of its token; or none
  const float* given;          // [given rows, hidden]: in place of their embeddings
  const float* given_cos;      // [given rows, rotary_dim / 2]: in place of what their positions say, or none
  const float* given_sin;
  double cut_off_at_s;         // of the steady clock: no further layer begins after it
};

// How the token of one row is chosen (SamplingParams); engine/native/sampler.py lays it out.
struct FsDraw {
  double temperature, top_p, min_p;  // temperature 0: greedy
  uint64_t seed;
  int64_t position;
  int64_t row;            // of the logits
  const int32_t* seen;    // tokens so far, each once
  const int32_t* counts;  // how often the output holds each
  int64_t num_seen;       // 0 where nothing is penalised
  const int32_t* biased;
  const float* biases;
  int64_t num_biased;
  const int32_t* allowed;
  int64_t num_allowed;    // 0: all
  const int32_t* forbidden;
  int64_t num_forbidden;
  const uint8_t* mask;    // a bit for each token, 1 if it is allowed; whole words of 16 bits; or none
  int32_t top_k;          // 0: all
  float repetition, presence, frequency;
};

struct FsSample {
  const float* logits;  // [rows, vocab]; not changed
  const FsDraw* draws;
  int64_t* tokens;  // [num_rows]
  int32_t vocab, num_rows;
};

// Log probabilities of one token of each row and of the likeliest ones.
struct FsLog {
  const float* logits;  // [rows, vocab]
  const int64_t* rows;  // [num_rows], of the logits
  const int64_t* tokens;
  const int32_t* num_top;
  int32_t* ids;   // [num_rows, width]
  float* values;  // [num_rows, 1 + width]: of the token, then of the likeliest
  int32_t vocab, num_rows, width;
};
}
