// A decoder model, packed for the step, with the scratch memory and the threads that compute it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "interface.h"
#include "latent.h"
#include "linear.h"
#include "parts.h"
#include "team.h"

namespace farsight {

struct Layer {
  FsNorm input_norm, post_norm, after_attention, after_mlp;
  const float *q_norm, *k_norm, *v_norm;
  std::unique_ptr<Linear> qkv, out, up, down;  // up and down may be missing beside experts
  std::unique_ptr<Experts> experts;
  std::unique_ptr<Latent> latent;
  const float *cos, *sin;
  int rotary_dim, window;
  Cache cache;
  const float* sinks;
  Shape shape;
  bool keeps_kv, gated;
  FsMixer mixer;
  std::unique_ptr<Linear> inputs_gate, inputs_out;
  FsNorm inputs_norm;
  float scale;
};

struct Model {
  explicit Model(const FsConfig& c)
      : config(c), shape{c.heads, c.kv_heads, c.head_dim, c.block_size, c.latent ? c.latent : c.head_dim, c.attention_scale,
                         c.attention_cap, c.slopes},
        team(c.num_threads) {
    layers.reserve(c.num_layers);
  }

  FsConfig config;
  Shape shape;
  Team team;
  std::vector<Layer> layers;
  FsNorm norm;
  std::unique_ptr<Linear> lm_head;
  FsInputs all_inputs{};  // width 0: layers get nothing beside the stream
  std::unique_ptr<Linear> inputs_projection;
  // Scratch, kept from step to step: fresh memory would cost page faults.
  std::vector<float> hidden, wide, sampled, attended, entered, inputs;
  std::vector<uint32_t> packed, picked, queries;
  ExpertRows expert_rows;
  LatentRows latent_rows;
  std::unique_ptr<std::atomic<int>[]> parts_left;  // of each item, tasks of attention that are not done
  size_t num_parts_left = 0;
};

inline std::unique_ptr<Linear> make_linear(const FsConfig& config, const FsLinear& from) {
  if (!from.n) return nullptr;
  return from.num_parts ? make_quantized(from) : make_dense(config.bf16, from);
}

inline std::unique_ptr<Experts> make_experts(const FsConfig& config, const FsExperts& from) {
  if (!from.count) return nullptr;
  auto experts = std::make_unique<Experts>();
  experts->count = from.count;
  experts->active = from.active;
  experts->normalized = from.normalized;
  experts->shared_gate = from.shared_gate;
  experts->sigmoid = from.sigmoid;
  experts->groups = from.groups;
  experts->active_groups = from.active_groups;
  experts->group_best = from.group_best;
  experts->correction = from.correction;
  experts->scale = from.scale;
  experts->router = make_linear(config, from.router);
  experts->router_norm = from.router_norm;
  experts->scales = from.scales;
  experts->before = from.before;
  experts->after_mlp = from.after_mlp;
  experts->after = from.after;
  for (int i = 0; i < from.count; ++i) {
    experts->up.push_back(make_linear(config, from.up[i]));
    experts->down.push_back(make_linear(config, from.down[i]));
  }
  return experts;
}

inline std::unique_ptr<Latent> make_latent(const FsConfig& config, const FsLatent& from) {
  if (!config.latent) return nullptr;
  auto latent = std::make_unique<Latent>();
  latent->q_norm = from.q_norm;
  latent->kv_norm = from.kv_norm;
  latent->q_up = make_linear(config, from.q_up);
  latent->keys = make_each(config.bf16, from.keys, config.heads, from.head_stride, true);
  latent->values = make_each(config.bf16, from.values, config.heads, from.head_stride, false);
  latent->turned = config.head_dim - config.latent;
  return latent;
}

inline Layer make_layer(const FsConfig& config, const Shape& shape, const FsLayer& from) {
  Layer layer;
  layer.shape = shape;
  layer.shape.head_dim = from.head_dim;
  layer.shape.kv_heads = from.kv_heads;
  if (!config.latent) layer.shape.value_dim = from.head_dim;
  layer.keeps_kv = from.keeps_kv;
  layer.gated = from.gated;
  layer.v_norm = from.v_norm;
  layer.mixer = from.mixer;
  layer.inputs_gate = make_linear(config, from.inputs_gate);
  layer.inputs_out = make_linear(config, from.inputs_out);
  layer.inputs_norm = from.inputs_norm;
  layer.scale = from.scale;
  layer.input_norm = from.input_norm;
  layer.post_norm = from.post_norm;
  layer.after_attention = from.after_attention;
  layer.after_mlp = from.after_mlp;
  layer.q_norm = from.q_norm;
  layer.k_norm = from.k_norm;
  layer.qkv = make_linear(config, from.qkv);
  layer.out = make_linear(config, from.out);
  layer.up = make_linear(config, from.up);
  layer.down = make_linear(config, from.down);
  layer.experts = make_experts(config, from.experts);
  layer.cos = from.cos;
  layer.sin = from.sin;
  layer.rotary_dim = from.rotary_dim;
  layer.window = from.window;
  layer.cache = {static_cast<uint8_t*>(from.keys), static_cast<uint8_t*>(from.values)};
  layer.sinks = from.sinks;
  layer.latent = make_latent(config, from.latent);
  return layer;
}

}  // namespace farsight
