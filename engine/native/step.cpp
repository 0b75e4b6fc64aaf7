// One step of a decoder model in one call that knows nothing of Python: the same arithmetic as engine/models/model.py.
// The residual stream and everything elementwise is float32; matrix products and attention take the model's type.
// The bits of a row depend neither on the other rows of the step nor on the number of threads (ADR 27).
//
// The caller's thread walks through the layers; `Team::share` spreads the rows, panels or heads of each stage over the
// threads and returns when the stage is complete.
#include <chrono>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "attention.h"
#include "interface.h"
#include "kv_int8.h"
#include "kv_latent.h"
#include "kv_plain.h"
#include "model.h"
#include "rows.h"
#include "states.h"

using namespace farsight;

namespace {

constexpr int kItemTokens = 16;     // most tokens of a sequence that are attended in one task
constexpr int kTasksPerThread = 6;  // tasks of attention at least, if there are so many

// Writes the norm of a row of n values; there is one.
inline void apply_norm(const FsConfig& c, const FsNorm& norm, const float* from, int n, float* to) {
  if (c.layer_norm)
    layer_norm(from, n, norm, c.norm_eps, to);
  else
    rms_norm(from, n, norm.weight, c.norm_eps, to);
}

// Norms `rows` rows of [hidden] and packs them as inputs of `linear`.
void norm_rows(Model& m, const FsNorm& norm, const Linear& linear, const float* x, int rows) {
  const int n = m.config.hidden;
  m.team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> buffer(n);
    for (int row = begin; row < end; ++row) {
      const float* from = x + size_t(row) * n;
      if (norm.weight) {
        apply_norm(m.config, norm, from, n, buffer.data());
        from = buffer.data();
      }
      linear.pack(from, m.packed.data() + size_t(row) * linear.stride);
    }
  });
}

template <class T>
void embed(Model& m, const FsStep& s) {
  const int n = m.config.hidden;
  const auto* table = static_cast<const typename T::Element*>(m.config.embedding);
  const auto* positions = static_cast<const typename T::Element*>(m.config.positions);
  m.team.share_ranges(s.num_rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* to = m.hidden.data() + size_t(row) * n;
      if (s.given_of && s.given_of[row] >= 0) {
        std::copy_n(s.given + size_t(s.given_of[row]) * n, n, to);
        continue;
      }
      const auto* from = table + s.token_ids[row] * n;
      for (int i = 0; i < n; ++i) to[i] = T::widen(from[i]);
      if (positions) {
        const auto* more = positions + s.positions[row] * n;
        for (int i = 0; i < n; ++i) to[i] += T::widen(more[i]);
      }
      if (m.config.embedding_scale != 1.0f)
        for (int i = 0; i < n; ++i) to[i] *= m.config.embedding_scale;
      if (m.config.embedding_norm.weight) apply_norm(m.config, m.config.embedding_norm, to, n, to);
    }
  });
}

// Cosines and sines of a row.
struct Angles {
  const float* cos;
  const float* sin;
};

Angles angles_of(const Layer& layer, const FsStep& s, int64_t row) {
  const int half = layer.rotary_dim / 2;
  if (s.given_cos && s.given_of[row] >= 0) {
    const size_t at = size_t(s.given_of[row]) * half;
    return {s.given_cos + at, s.given_sin + at};
  }
  return {layer.cos + s.positions[row] * half, layer.sin + s.positions[row] * half};
}

// Outputs of the qkv product that become queries; keys and values follow.
template <class Kv>
int query_outputs(const FsConfig& c, const Layer& layer) {
  return Kv::kIsLatent ? layer.qkv->n - layer.latent->width() : c.heads * layer.shape.head_dim;
}

// Norms and turns `heads` consecutive heads of a row.
void turn(const FsConfig& c, const Layer& layer, float* first, int heads, const float* norm, Angles angles) {
  const int d = layer.shape.head_dim, half = layer.rotary_dim / 2;
  if (norm && c.row_norm) rms_norm(first, heads * d, norm, c.norm_eps, first);
  for (int head = 0; head < heads; ++head) {
    float* at = first + head * d;
    if (norm && !c.row_norm) rms_norm(at, d, norm, c.norm_eps, at);
    if (half) rotate(at, layer.rotary_dim, angles.cos, angles.sin);
  }
}

// Takes queries of row `row` of the step from a row of the qkv product to m.queries.
template <class Kv>
void take_queries(Model& m, const Layer& layer, float* qkv, const FsStep& s, int64_t row, int query_row) {
  const FsConfig& c = m.config;
  const int d = layer.shape.head_dim, words = Kv::query_words(d);
  turn(c, layer, qkv, c.heads, layer.q_norm, angles_of(layer, s, row));
  if (c.query_scales)
    for (int i = 0; i < c.heads * d; ++i) qkv[i] *= c.query_scales[s.positions[row]];
  uint32_t* to = m.queries.data() + size_t(query_row) * c.heads * words;
  for (int head = 0; head < c.heads; ++head) Kv::pack_query(qkv + head * d, d, to + head * words);
}

// The same for latents, from `rows` rows: row r is row step_row(r) of the step.
template <class Kv, class StepRow>
void take_latent_queries(Model& m, const Layer& layer, const FsStep& s, int rows, const StepRow& step_row) {
  const FsConfig& c = m.config;
  const int words = Kv::query_words(c.head_dim);
  make_queries(
      m.team, *layer.latent, m.wide.data(), layer.qkv->n, rows, m.latent_rows,
      [&](int row, float* query) { turn(c, layer, query, 1, nullptr, angles_of(layer, s, step_row(row))); },
      [&](int row, int head, const float* query) {
        Kv::pack_query(query, c.head_dim, m.queries.data() + (size_t(row) * c.heads + head) * words);
      });
}

// Takes keys and values from a row of the qkv product into the pool.
template <class Kv>
void take_kv(Model& m, const Layer& layer, float* qkv, Angles angles, int64_t slot) {
  if (!layer.keeps_kv) return;
  const FsConfig& c = m.config;
  float* keys = qkv + query_outputs<Kv>(c, layer);
  if constexpr (Kv::kIsLatent) {
    float* own = keys + layer.latent->turned;
    rms_norm(own, layer.latent->rank(), layer.latent->kv_norm, kLatentEps, own);
  }
  const int d = layer.shape.head_dim, kv_heads = layer.shape.kv_heads;
  turn(c, layer, keys, kv_heads, layer.k_norm, angles);
  float* values = keys + kv_heads * d;
  if (layer.v_norm)
    for (int head = 0; head < kv_heads; ++head) rms_norm(values + head * d, d, layer.v_norm, c.norm_eps, values + head * d);
  Kv::store(layer.shape, layer.cache, slot, keys, values);
}

// Queries, keys and values of every row.
template <class Kv>
void project(Model& m, const Layer& layer, const FsStep& s) {
  const Linear& linear = *layer.qkv;
  apply(m.team, linear, m.packed.data(), s.num_rows, m.wide.data(), false);
  m.team.share_ranges(s.num_rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* qkv = m.wide.data() + size_t(row) * linear.n;
      if constexpr (!Kv::kIsLatent) take_queries<Kv>(m, layer, qkv, s, row, row);
      take_kv<Kv>(m, layer, qkv, angles_of(layer, s, row), s.slot_ids[row]);
    }
  });
  if constexpr (Kv::kIsLatent) take_latent_queries<Kv>(m, layer, s, s.num_rows, [](int row) { return row; });
}

// Keys and values of every row, queries only of the sampled rows: query row r is that of sample r. A panel that holds
// both queries and keys is computed for both.
template <class Kv>
void project_sampled(Model& m, const Layer& layer, const FsStep& s) {
  const Linear& linear = *layer.qkv;
  const int size = query_outputs<Kv>(m.config, layer);
  apply(m.team, linear, m.packed.data(), s.num_rows, m.wide.data(), false, size / kPanel, linear.panels);
  m.team.share_ranges(s.num_rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row)
      take_kv<Kv>(m, layer, m.wide.data() + size_t(row) * linear.n, angles_of(layer, s, row), s.slot_ids[row]);
  });
  ensure(m.picked, size_t(s.num_samples) * linear.stride);
  for (int r = 0; r < s.num_samples; ++r)
    std::copy_n(m.packed.data() + s.sample_rows[r] * linear.stride, linear.stride,
                m.picked.data() + size_t(r) * linear.stride);
  const int panels = layer.gated ? linear.panels : (size + kPanel - 1) / kPanel;  // gates are of the rows that go on
  apply(m.team, linear, m.picked.data(), s.num_samples, m.wide.data(), false, 0, panels);
  if constexpr (Kv::kIsLatent)
    take_latent_queries<Kv>(m, layer, s, s.num_samples, [&](int r) { return s.sample_rows[r]; });
  else
    m.team.share_ranges(s.num_samples, [&](int begin, int end) {
      for (int r = begin; r < end; ++r)
        take_queries<Kv>(m, layer, m.wide.data() + size_t(r) * linear.n, s, s.sample_rows[r], r);
    });
}

// Attends every item and packs the results of `rows` rows as inputs of layer.out. One task is one item and some of its
// parts, all of them where there are many items; the task that completes an item packs its rows.
template <class Kv>
void attend_items(Model& m, const Layer& layer, const std::vector<Item>& items, int rows) {
  const Shape& shape = layer.shape;
  const int size = m.config.heads * shape.value_dim;
  const int wanted = kTasksPerThread * m.team.size();  // so that no thread waits long for another
  int most = 1;
  for (const Item& item : items) most = std::max(most, parts_of(shape, item));
  const int parts = std::clamp(wanted / std::max(1, int(items.size())), 1, most);
  if constexpr (Kv::kIsLatent) ensure(m.latent_rows.packed, size_t(rows) * m.config.heads * layer.latent->values[0]->stride);
  for (size_t i = 0; i < items.size(); ++i) m.parts_left[i].store(parts, std::memory_order_relaxed);
  m.team.share(int(items.size()) * parts, [&](int task) {
    const Item& item = items[task / parts];
    const int part = task % parts, own = parts_of(shape, item);
    attend_parts<Kv>(shape, layer.cache, item, own * part / parts, own * (part + 1) / parts, layer.window, layer.sinks,
                     m.queries.data(), m.attended.data());
    if (m.parts_left[task / parts].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int row = item.out_row; row < item.out_row + item.num_queries; ++row) {
      float* attended = m.attended.data() + size_t(row) * size;
      if (layer.gated) {
        const float* gates = m.wide.data() + size_t(row + 1) * layer.qkv->n - size;
        for (int i = 0; i < size; ++i) attended[i] *= sigmoid(gates[i]);
      }
      if constexpr (Kv::kIsLatent)
        pack_sums(*layer.latent, attended, row, rows, m.latent_rows);
      else
        layer.out->pack(attended, m.packed.data() + size_t(row) * layer.out->stride);
    }
  });
  if constexpr (Kv::kIsLatent) make_values(m.team, *layer.latent, *layer.out, rows, m.latent_rows, m.packed.data());
}

// The same for a layer with a state in place of attention, from the norm of the step's rows on: all of them bring the
// states forward, `rows` of them go on.
void mix(Model& m, const Layer& layer, const FsStep& s, const std::vector<Item>& sequences, int rows) {
  const FsMixer& mixer = layer.mixer;
  apply(m.team, *layer.qkv, m.packed.data(), s.num_rows, m.wide.data(), false);
  const auto state_in = [&](int row) { return m.config.states + size_t(row) * m.config.state_size + mixer.first; };
  std::vector<StateRows> states(sequences.size());
  for (size_t i = 0; i < states.size(); ++i) states[i].state = state_in(s.state_rows[i]);
  for (const int32_t* keep = s.state_keeps; keep < s.state_keeps + 3 * s.num_keeps; keep += 3)
    states[keep[0]].keeps.push_back({keep[1], state_in(keep[2])});
  mix_rows(m.team, mixer, sequences, states, m.wide.data(), layer.qkv->n, m.config.norm_eps, m.attended.data());
  const bool all = rows == s.num_rows;
  m.team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const size_t from = all ? row : s.sample_rows[row];
      layer.out->pack(m.attended.data() + from * mixer.mixed, m.packed.data() + size_t(row) * layer.out->stride);
    }
  });
}

// Applies the activation to n values.
void activate_values(const FsConfig& c, float* x, int n) {
  switch (c.activation) {
    case kSilu: silu(x, n); break;
    case kRelu: relu(x, n); break;
    case kGelu: gelu(x, n); break;
    default: gelu_tanh(x, n);
  }
}

// Applies the activation to a row of the first product of an MLP; it becomes n inputs of the second.
void activate_row(const FsConfig& c, float* x, int n) {
  if (c.gate_limit > 0) return clamped_gate_up(x, x + n, n, c.gate_limit, c.gate_alpha);
  if (c.gated && c.activation == kSilu) return gate_up(x, x + n, n);
  activate_values(c, x, n);
  if (c.gated) multiply(x, x + n, n);
}

// Applies the activation to every row of the first product of the MLP and packs it for the second.
void activate(Model& m, const Layer& layer, int rows) {
  m.team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* x = m.wide.data() + size_t(row) * layer.up->n;
      activate_row(m.config, x, layer.down->k);
      layer.down->pack(x, m.packed.data() + size_t(row) * layer.down->stride);
    }
  });
}

// Adds the product of packed rows to the rows of x, through a norm and a factor where the model has them.
void add_product(Model& m, const Linear& linear, const FsNorm& norm, int rows, float* x) {
  const float scale = m.config.residual_scale;
  if (!norm.weight && scale == 1.0f) return apply(m.team, linear, m.packed.data(), rows, x, true);
  const int n = m.config.hidden;
  apply(m.team, linear, m.packed.data(), rows, m.wide.data(), false);
  m.team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float *from = m.wide.data() + size_t(row) * n, *to = x + size_t(row) * n;
      if (norm.weight) apply_norm(m.config, norm, from, n, from);
      for (int i = 0; i < n; ++i) to[i] += from[i] * scale;
    }
  });
}

// Adds what the experts of each row make of the norm of `from` to the rows of x, with those that every row takes.
void add_mixture(Model& m, const Layer& layer, const float* from, int rows, float* x) {
  const Experts& experts = *layer.experts;
  const int n = m.config.hidden;
  ExpertRows& r = m.expert_rows;
  ensure(r.normed, size_t(rows) * n), ensure(r.scores, size_t(rows) * experts.router->n);
  m.team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* normed = r.normed.data() + size_t(row) * n;
      if (layer.post_norm.weight)
        apply_norm(m.config, layer.post_norm, from + size_t(row) * n, n, normed);
      else
        std::copy_n(from + size_t(row) * n, n, normed);
      experts.router->pack(normed, m.packed.data() + size_t(row) * experts.router->stride);
    }
  });
  apply(m.team, *experts.router, m.packed.data(), rows, r.scores.data(), false);
  run_experts(m.team, experts, rows, r, [&](float* wide) { activate_row(m.config, wide, experts.down[0]->k); });
  if (layer.up) {  // into m.attended, which attention has done with
    m.team.share_ranges(rows, [&](int begin, int end) {
      for (int row = begin; row < end; ++row)
        layer.up->pack(r.normed.data() + size_t(row) * n, m.packed.data() + size_t(row) * layer.up->stride);
    });
    apply(m.team, *layer.up, m.packed.data(), rows, m.wide.data(), false);
    activate(m, layer, rows);
    apply(m.team, *layer.down, m.packed.data(), rows, m.attended.data(), false);
  }
  m.team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> sums(n);
    for (int row = begin; row < end; ++row) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      add_experts(experts, r, row, n, sums.data());
      if (layer.up) {
        const float* shared = m.attended.data() + size_t(row) * n;
        const float* scores = r.scores.data() + size_t(row) * experts.router->n;
        const float gate = experts.shared_gate ? sigmoid(scores[experts.count]) : 1.0f;
        for (int i = 0; i < n; ++i) sums[i] += gate * shared[i];
      }
      if (layer.after_mlp.weight) apply_norm(m.config, layer.after_mlp, sums.data(), n, sums.data());
      float* to = x + size_t(row) * n;
      for (int i = 0; i < n; ++i) to[i] += sums[i] * m.config.residual_scale;
    }
  });
}

// Adds what an MLP and the experts beside it make of the rows of x, each through norms of its own.
void add_beside(Model& m, const Layer& layer, int rows, float* x) {
  const Experts& experts = *layer.experts;
  const FsConfig& c = m.config;
  const int n = c.hidden;
  ExpertRows& r = m.expert_rows;
  ensure(r.normed, size_t(rows) * n), ensure(r.scores, size_t(rows) * experts.router->n);
  norm_rows(m, layer.post_norm, *layer.up, x, rows);
  apply(m.team, *layer.up, m.packed.data(), rows, m.wide.data(), false);
  activate(m, layer, rows);
  apply(m.team, *layer.down, m.packed.data(), rows, m.attended.data(), false);
  norm_rows(m, FsNorm{experts.router_norm, nullptr}, *experts.router, x, rows);
  apply(m.team, *experts.router, m.packed.data(), rows, r.scores.data(), false);
  m.team.share_ranges(rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row)
      apply_norm(c, experts.before, x + size_t(row) * n, n, r.normed.data() + size_t(row) * n);
  });
  run_experts(m.team, experts, rows, r, [&](float* wide) { activate_row(c, wide, experts.down[0]->k); });
  m.team.share_ranges(rows, [&](int begin, int end) {
    std::vector<float> sums(n);
    for (int row = begin; row < end; ++row) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      add_experts(experts, r, row, n, sums.data());
      apply_norm(c, experts.after, sums.data(), n, sums.data());
      float *plain = m.attended.data() + size_t(row) * n, *to = x + size_t(row) * n;
      apply_norm(c, experts.after_mlp, plain, n, plain);
      for (int i = 0; i < n; ++i) sums[i] += plain[i];
      if (layer.after_mlp.weight) apply_norm(c, layer.after_mlp, sums.data(), n, sums.data());
      for (int i = 0; i < n; ++i) to[i] += sums[i] * c.residual_scale;
    }
  });
}

// What every layer gets of each row beside the stream, into m.inputs [rows, layers * width], of the embeddings in m.hidden.
template <class T>
void make_inputs(Model& m, const FsStep& s) {
  const FsInputs& inputs = m.all_inputs;
  const Linear& projection = *m.inputs_projection;
  const int n = m.config.hidden, width = inputs.width;
  const auto* table = static_cast<const typename T::Element*>(inputs.embedding);
  ensure(m.inputs, size_t(s.num_rows) * projection.n);
  norm_rows(m, FsNorm{}, projection, m.hidden.data(), s.num_rows);
  apply(m.team, projection, m.packed.data(), s.num_rows, m.inputs.data(), false);
  const float scale = 1.0f / std::sqrt(float(n)), half = std::sqrt(0.5f);
  m.team.share_ranges(s.num_rows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      float* made = m.inputs.data() + size_t(row) * projection.n;
      const auto* own = table + s.token_ids[row] * projection.n;
      for (int i = 0; i < projection.n; ++i) made[i] *= scale;
      for (int i = 0; i < projection.n; i += width) rms_norm(made + i, width, inputs.norm, m.config.norm_eps, made + i);
      for (int i = 0; i < projection.n; ++i) made[i] = (made[i] + T::widen(own[i]) * inputs.scale) * half;
    }
  });
}

// Adds what a layer makes of its own inputs, and scales the stream at its end.
void end_layer(Model& m, const Layer& layer, int index, const FsStep& s, int rows, float* x) {
  const int n = m.config.hidden, width = m.all_inputs.width;
  const bool all = rows == s.num_rows;
  if (layer.inputs_gate) {
    const size_t stride = m.inputs_projection->n;
    norm_rows(m, FsNorm{}, *layer.inputs_gate, x, rows);
    apply(m.team, *layer.inputs_gate, m.packed.data(), rows, m.wide.data(), false);
    m.team.share_ranges(rows, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        float* gate = m.wide.data() + size_t(row) * width;
        activate_values(m.config, gate, width);
        multiply(gate, m.inputs.data() + (all ? row : s.sample_rows[row]) * stride + size_t(index) * width, width);
        layer.inputs_out->pack(gate, m.packed.data() + size_t(row) * layer.inputs_out->stride);
      }
    });
    add_product(m, *layer.inputs_out, layer.inputs_norm, rows, x);
  }
  if (layer.scale != 1.0f)
    m.team.share_ranges(rows, [&](int begin, int end) {
      for (size_t i = size_t(begin) * n; i < size_t(end) * n; ++i) x[i] *= layer.scale;
    });
}

// Scales and caps logits.
void shape_logits(const FsConfig& c, float* logits) {
  if (c.logit_scale != 1.0f)
    for (int i = 0; i < c.vocab; ++i) logits[i] *= c.logit_scale;
  if (c.logit_cap > 0)
    for (int i = 0; i < c.vocab; i += kWidth)
      store_first(logits + i, tanh(load_first(logits + i, c.vocab - i) / c.logit_cap) * c.logit_cap, c.vocab - i);
}

// Sequences of the step, and the same cut into items of at most kItemTokens tokens.
struct Work {
  std::vector<Item> sequences, items;
};

Work work_of(const FsStep& s) {
  Work work;
  int row = 0;
  for (int i = 0; i < s.num_items; ++i) {
    const int queries = s.lengths[2 * i], kv_len = s.lengths[2 * i + 1];
    const int32_t* blocks = s.tables + size_t(i) * s.width;
    work.sequences.push_back({row, row, queries, kv_len, blocks});
    for (int first = 0; first < queries; first += kItemTokens) {
      const int count = std::min(kItemTokens, queries - first);
      work.items.push_back({row + first, row + first, count, kv_len - queries + first + count, blocks});
    }
    row += queries;
  }
  return work;
}

// Each sampled row as an item of one query; `project_sampled` has put the queries of sample r into query row r.
std::vector<Item> sampled_items(const FsStep& s, const std::vector<Item>& sequences) {
  std::vector<Item> sampled(s.num_samples);
  size_t i = 0;
  for (int r = 0; r < s.num_samples; ++r) {
    const int row = int(s.sample_rows[r]);
    while (row >= sequences[i].row + sequences[i].num_queries) ++i;
    const int behind = sequences[i].row + sequences[i].num_queries - 1 - row;  // rows of its sequence after it
    sampled[r] = {r, r, 1, sequences[i].kv_len - behind, sequences[i].blocks};
  }
  return sampled;
}

void make_room(Model& m, const FsStep& s, size_t query_words) {
  const size_t rows = s.num_rows;
  size_t widest = m.config.hidden, longest = m.lm_head->stride, mixed = m.config.hidden;
  if (m.inputs_projection) longest = std::max<size_t>(longest, m.inputs_projection->stride);
  for (const Layer& layer : m.layers) {
    mixed = std::max<size_t>(mixed, std::max(m.config.heads * layer.shape.value_dim, layer.mixer.mixed));
    const Linear* router = layer.experts ? layer.experts->router.get() : nullptr;
    const std::initializer_list<const Linear*> all{layer.qkv.get(), layer.out.get(),         layer.up.get(),        layer.down.get(),
                                                   router,          layer.inputs_gate.get(), layer.inputs_out.get()};
    for (const Linear* linear : all) {
      if (!linear) continue;
      widest = std::max<size_t>(widest, linear->n);
      longest = std::max<size_t>(longest, linear->stride);
    }
  }
  ensure(m.hidden, rows * m.config.hidden);
  ensure(m.sampled, size_t(s.num_samples) * m.config.hidden);
  if (m.config.parallel) ensure(m.entered, rows * m.config.hidden);
  ensure(m.wide, rows * widest);
  ensure(m.packed, rows * longest);
  ensure(m.queries, rows * query_words);
  ensure(m.attended, rows * mixed);
  if (m.num_parts_left < rows) {
    m.parts_left.reset(new std::atomic<int>[rows]);
    m.num_parts_left = rows;
  }
}

struct CutOff {};

bool is_over(double instant_s) {
  if (instant_s == std::numeric_limits<double>::infinity()) return false;
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() >= instant_s;
}

template <class T, class Kv>
void run(Model& m, const FsStep& s) {
  const FsConfig& c = m.config;
  int head_dim = 0;
  for (const Layer& layer : m.layers) head_dim = std::max(head_dim, layer.shape.head_dim);
  make_room(m, s, size_t(c.heads) * Kv::query_words(head_dim));
  embed<T>(m, s);
  if (m.inputs_projection) make_inputs<T>(m, s);
  Work work = work_of(s);
  float* x = m.hidden.data();
  int rows = s.num_rows;
  for (const Layer& layer : m.layers) {
    if (is_over(s.cut_off_at_s)) throw CutOff{};
    if (s.middle && &layer == &m.layers[m.layers.size() / 2])
      for (int r = 0; r < s.num_samples; ++r)
        std::copy_n(x + s.sample_rows[r] * c.hidden, c.hidden, s.middle + size_t(r) * c.hidden);
    norm_rows(m, layer.input_norm, *layer.qkv, x, rows);
    const bool narrows = &layer == &m.layers.back() && s.num_samples < s.num_rows;
    const bool attends = layer.mixer.kind == kAttention;
    if (!attends)
      mix(m, layer, s, work.sequences, narrows ? s.num_samples : rows);
    else if (narrows)
      project_sampled<Kv>(m, layer, s);
    else
      project<Kv>(m, layer, s);
    if (attends)
      for (const Item& sequence : work.sequences) Kv::end_values(layer.shape, layer.cache, sequence);
    if (narrows) {  // only sampled rows go on
      work.items = sampled_items(s, work.sequences);
      rows = s.num_samples;
      for (int r = 0; r < rows; ++r)
        std::copy_n(x + s.sample_rows[r] * c.hidden, c.hidden, m.sampled.data() + size_t(r) * c.hidden);
      x = m.sampled.data();
    }
    if (attends) attend_items<Kv>(m, layer, work.items, rows);
    if (c.parallel) std::copy_n(x, size_t(rows) * c.hidden, m.entered.data());
    add_product(m, *layer.out, layer.after_attention, rows, x);
    const float* entered = c.parallel ? m.entered.data() : x;
    if (layer.experts && layer.experts->router_norm) {
      add_beside(m, layer, rows, x);
    } else if (layer.experts) {
      add_mixture(m, layer, entered, rows, x);
    } else {
      norm_rows(m, layer.post_norm, *layer.up, entered, rows);
      apply(m.team, *layer.up, m.packed.data(), rows, m.wide.data(), false);
      activate(m, layer, rows);
      add_product(m, *layer.down, layer.after_mlp, rows, x);
    }
    end_layer(m, layer, int(&layer - m.layers.data()), s, rows, x);
  }
  if (s.hidden) std::copy_n(x, size_t(rows) * c.hidden, s.hidden);
  norm_rows(m, m.norm, *m.lm_head, x, rows);
  apply(m.team, *m.lm_head, m.packed.data(), rows, s.logits, false);
  m.team.share(rows, [&](int r) {
    float* logits = s.logits + size_t(r) * c.vocab;
    shape_logits(c, logits);
    choose(logits, c.vocab, s.best + r);
  });
}

thread_local std::string failure;

// Calls body(); returns 0, or 1 if memory ran out, 2 after another exception, which fs_failure describes, 3 after CutOff. No
// exception may leave a C function.
template <class Body>
int32_t guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const CutOff&) {
    return 3;
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::exception& error) {
    failure = error.what();
    return 2;
  }
}

}  // namespace

extern "C" {

const char* fs_failure() { return failure.c_str(); }

int32_t fs_create(const FsConfig* config, void** handle) {
  return guarded([&] { *handle = new Model(*config); });
}

int32_t fs_add_layer(void* handle, const FsLayer* from) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(handle);
    m.layers.push_back(make_layer(m.config, m.shape, *from));
  });
}

int32_t fs_set_head(void* handle, const FsNorm* norm, const FsLinear* lm_head) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(handle);
    m.norm = *norm;
    m.lm_head = make_linear(m.config, *lm_head);
  });
}

int32_t fs_set_inputs(void* handle, const FsInputs* inputs) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(handle);
    m.all_inputs = *inputs;
    m.inputs_projection = make_linear(m.config, inputs->projection);
  });
}

int32_t fs_step(void* handle, const FsStep* step) {
  return guarded([&] {
    Model& m = *static_cast<Model*>(handle);
    if (m.config.latent)
      m.config.bf16 ? run<Bf16, LatentKv<Bf16>>(m, *step) : run<F32, LatentKv<F32>>(m, *step);
    else if (m.config.bf16)
      m.config.kv_int8 ? run<Bf16, Int8Kv>(m, *step) : run<Bf16, PlainKv<Bf16>>(m, *step);
    else
      m.config.kv_int8 ? run<F32, Int8Kv>(m, *step) : run<F32, PlainKv<F32>>(m, *step);
  });
}

// The team of a model computes, or the caller's thread alone where there is no model.
int32_t fs_sample(void* handle, const FsSample* sample) {
  return guarded([&] { sample_rows(handle ? &static_cast<Model*>(handle)->team : nullptr, *sample); });
}

int32_t fs_log(void* handle, const FsLog* log) {
  return guarded([&] { log_rows(handle ? &static_cast<Model*>(handle)->team : nullptr, *log); });
}

void fs_destroy(void* handle) { delete static_cast<Model*>(handle); }
}
