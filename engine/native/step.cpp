// One step of a decoder model in one call that knows nothing of Python: the same arithmetic as engine/model.py.
// The residual stream and everything elementwise is float32; matrix products and attention take the model's type.
// What becomes of a row does not depend, to the bit, on what else is in the step or how many threads there are (ADR 27).
#include <memory>

#include "attention.h"
#include "linear.h"

using namespace farsight;

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

namespace {

struct Layer {
  FsNorm input_norm, post_norm;
  const float *q_norm, *k_norm;
  Linear qkv, out, up, down;
  int window;
  Cache cache;
};

struct Model {
  FsConfig config;
  Shape shape;
  std::vector<Layer> layers;
  FsNorm norm;
  Linear lm_head;
  // Scratch, kept from step to step: fresh memory would cost page faults.
  std::vector<float> hidden, wide, sampled;
  std::vector<uint32_t> packed, queries, attended;
};

template <class V>
void ensure(V& v, size_t n) {
  if (v.size() < n) v.resize(n);
}

// Value i is added up in lane i % kWidth.
float mean(const float* x, int n) {
  f32v s = {};
  for (int i = 0; i < n; i += kWidth) s += load_first(x + i, n - i);
  return sum(s) / n;
}

float mean_square(const float* x, int n) {
  f32v s = {};
  for (int i = 0; i < n; i += kWidth) {
    const f32v v = load_first(x + i, n - i);
    s = fma(v, v, s);
  }
  return sum(s) / n;
}

void rms_norm(const float* x, int n, const float* weight, float eps, float* out) {
  const float factor = 1.0f / std::sqrt(mean_square(x, n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void layer_norm(const float* x, int n, const FsNorm& norm, float eps, float* out) {
  const float center = mean(x, n);
  for (int i = 0; i < n; ++i) out[i] = x[i] - center;
  const float factor = 1.0f / std::sqrt(mean_square(out, n) + eps);
  for (int i = 0; i < n; ++i) out[i] = out[i] * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f);
}

// Norms `rows` rows of [hidden] into lanes.
template <class T>
void norm_rows(const Model& m, const FsNorm& norm, const float* x, int rows, uint32_t* out) {
  const int n = m.config.hidden, lanes = n / T::kPerLane;
#pragma omp parallel for num_threads(m.config.num_threads) if (m.config.num_threads > 1)
  for (int row = 0; row < rows; ++row) {
    const float* from = x + size_t(row) * n;
    float buffer[n];
    if (!norm.weight)
      std::copy(from, from + n, buffer);
    else if (m.config.layer_norm)
      layer_norm(from, n, norm, m.config.norm_eps, buffer);
    else
      rms_norm(from, n, norm.weight, m.config.norm_eps, buffer);
    pack<T>(buffer, n, out + size_t(row) * lanes);
  }
}

template <class T>
void embed(const Model& m, const FsStep& s, float* hidden) {
  const int n = m.config.hidden;
  const auto* table = static_cast<const typename T::Element*>(m.config.embedding);
  const auto* positions = static_cast<const typename T::Element*>(m.config.positions);
  for (int row = 0; row < s.num_rows; ++row) {
    float* to = hidden + size_t(row) * n;
    const auto* from = table + s.token_ids[row] * n;
    for (int i = 0; i < n; ++i) to[i] = T::widen(from[i]);
    if (!positions) continue;
    const auto* more = positions + s.positions[row] * n;
    for (int i = 0; i < n; ++i) to[i] += T::widen(more[i]);
  }
}

// Turns the two halves of the first rotary_dim values against each other.
void rotate(float* head, int rotary_dim, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i] + a * sin[i];
  }
}

// Norms and turns the queries and keys of every row; queries go to m.queries, keys and values into the pool.
template <class T>
void take_qkv(Model& m, const Layer& layer, const FsStep& s) {
  const FsConfig& c = m.config;
  const int d = c.head_dim, half = c.rotary_dim / 2, turned = c.heads + c.kv_heads;
#pragma omp parallel for num_threads(c.num_threads) if (c.num_threads > 1)
  for (int row = 0; row < s.num_rows; ++row) {
    float* qkv = m.wide.data() + size_t(row) * layer.qkv.n;
    const int64_t position = s.positions[row];
    for (int head = 0; head < turned; ++head) {
      const float* norm = head < c.heads ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(qkv + head * d, d, norm, c.norm_eps, qkv + head * d);
      if (half) rotate(qkv + head * d, c.rotary_dim, c.cos + position * half, c.sin + position * half);
    }
    pack<T>(qkv, c.heads * d, m.queries.data() + size_t(row) * (c.heads * d / T::kPerLane));
    store_kv<T>(m.shape, layer.cache, s.slot_ids[row], qkv + c.heads * d, qkv + turned * d);
  }
}

template <class T>
void attend_items(Model& m, const Layer& layer, const std::vector<Item>& items) {
  const int group = m.shape.group(), num = int(items.size()) * m.shape.kv_heads;
#pragma omp parallel for num_threads(m.config.num_threads) if (m.config.num_threads > 1) schedule(dynamic)
  for (int i = 0; i < num; ++i) {
    const Item& item = items[i / m.shape.kv_heads];
    const int queries = item.num_queries * group;
    for (int first = 0; first < queries; first += kMaxQueries)
      attend_tile<T>(m.shape, layer.cache, item, i % m.shape.kv_heads, first, std::min(kMaxQueries, queries - first),
                     layer.window, m.queries.data(), m.attended.data());
  }
}

// silu(gate) * up, in place of the gate.
void gate_up(float* gate, const float* up, int n) {
  for (int i = 0; i < n; i += kWidth) {
    const f32v g = load_first(gate + i, n - i);
    store_first(gate + i, g / (1.0f + exp(-g)) * load_first(up + i, n - i), n - i);
  }
}

void relu(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = x[i] > 0 ? x[i] : 0.0f;
}

void gelu(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] *= 0.5f * (1.0f + std::erf(x[i] * 0.70710678f));
}

// What lies between the two products of the MLP, of every row, into lanes.
template <class T>
void activate(Model& m, int rows, uint32_t* out) {
  const int n = m.config.intermediate, lanes = n / T::kPerLane, wide = m.layers[0].up.n;
#pragma omp parallel for num_threads(m.config.num_threads) if (m.config.num_threads > 1)
  for (int row = 0; row < rows; ++row) {
    float* x = m.wide.data() + size_t(row) * wide;
    switch (m.config.activation) {
      case kSilu: gate_up(x, x + n, n); break;
      case kRelu: relu(x, n); break;
      default: gelu(x, n);
    }
    pack<T>(x, n, out + size_t(row) * lanes);
  }
}

std::vector<Item> items_of(const FsStep& s) {
  std::vector<Item> items(s.num_items);
  int row = 0;
  for (int i = 0; i < s.num_items; ++i) {
    items[i] = {row, row, s.lengths[2 * i], s.lengths[2 * i + 1], s.tables + size_t(i) * s.width};
    row += s.lengths[2 * i];
  }
  return items;
}

// Of the last layer only the rows that are sampled are wanted: each becomes an item of one query.
std::vector<Item> sampled_items(const FsStep& s, const std::vector<Item>& items) {
  std::vector<Item> sampled(s.num_samples);
  size_t i = 0;
  for (int r = 0; r < s.num_samples; ++r) {
    const int row = int(s.sample_rows[r]);
    while (row >= items[i].row + items[i].num_queries) ++i;
    sampled[r] = {row, r, 1, int(s.positions[row]) + 1, items[i].blocks};
  }
  return sampled;
}

// The likeliest token; -1 where there is none: a NaN among the logits, which no comparison finds, +inf, or all -inf.
void choose(const float* logits, int n, int64_t* best) {
  int at = 0;
  float top = logits[0];
  int32_t lacks = 0;
  int i = 0;
  if (n >= 2 * kWidth) {
    f32v tops = load<f32v>(logits);
    i32v nans = tops != tops;
    for (i = kWidth; i + kWidth <= n; i += kWidth) {
      const f32v x = load<f32v>(logits + i);
      nans |= x != x;
      tops = max(tops, x);
    }
    for (int lane = 0; lane < kWidth; ++lane) lacks |= nans[lane];
    top = largest(tops);
    while (!lacks && logits[at] != top) ++at;
  }
  for (; i < n; ++i) {
    lacks |= logits[i] != logits[i];
    if (logits[i] > top) top = logits[i], at = i;
  }
  *best = lacks || !std::isfinite(top) ? -1 : at;
}

template <class T>
void run(Model& m, const FsStep& s) {
  const FsConfig& c = m.config;
  const int hidden = c.hidden, threads = c.num_threads;
  const size_t rows = s.num_rows, query_lanes = size_t(c.heads) * c.head_dim / T::kPerLane;
  const size_t widest = std::max(m.layers[0].qkv.n, m.layers[0].up.n);
  ensure(m.hidden, rows * hidden);
  ensure(m.sampled, size_t(s.num_samples) * hidden);
  ensure(m.wide, rows * widest);
  ensure(m.packed, rows * std::max(m.layers[0].qkv.lanes, m.layers[0].down.lanes));
  ensure(m.queries, rows * query_lanes);
  ensure(m.attended, rows * query_lanes);

  float* x = m.hidden.data();
  embed<T>(m, s, x);
  const std::vector<Item> items = items_of(s);
  int num = s.num_rows;
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer& layer = m.layers[i];
    norm_rows<T>(m, layer.input_norm, x, num, m.packed.data());
    apply<T>(layer.qkv, m.packed.data(), num, m.wide.data(), false, threads);
    take_qkv<T>(m, layer, s);
    for (const Item& item : items) end_values<T>(m.shape, layer.cache, item);
    if (i + 1 < m.layers.size()) {
      attend_items<T>(m, layer, items);
    } else {
      if (s.num_samples == 0) return;
      attend_items<T>(m, layer, sampled_items(s, items));
      for (int r = 0; r < s.num_samples; ++r)
        std::copy_n(x + s.sample_rows[r] * hidden, hidden, m.sampled.data() + size_t(r) * hidden);
      x = m.sampled.data();
      num = s.num_samples;
    }
    apply<T>(layer.out, m.attended.data(), num, x, true, threads);
    norm_rows<T>(m, layer.post_norm, x, num, m.packed.data());
    apply<T>(layer.up, m.packed.data(), num, m.wide.data(), false, threads);
    activate<T>(m, num, m.packed.data());
    apply<T>(layer.down, m.packed.data(), num, x, true, threads);
  }
  norm_rows<T>(m, m.norm, x, num, m.packed.data());
  apply<T>(m.lm_head, m.packed.data(), num, s.logits, false, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int r = 0; r < num; ++r) choose(s.logits + size_t(r) * c.vocab, c.vocab, s.best + r);
}

void take(const Model& m, Linear& linear, const FsLinear& from) {
  if (m.config.bf16)
    pack_linear<Bf16>(linear, static_cast<const uint16_t*>(from.weight), from.bias, from.n, from.k);
  else
    pack_linear<F32>(linear, static_cast<const float*>(from.weight), from.bias, from.n, from.k);
}

}  // namespace

extern "C" {

void* fs_create(const FsConfig* config) {
  auto model = std::make_unique<Model>();
  model->config = *config;
  model->shape = {config->heads, config->kv_heads, config->head_dim, config->block_size};
  model->layers.reserve(config->num_layers);
  return model.release();
}

void fs_add_layer(void* handle, const FsLayer* from) {
  Model& m = *static_cast<Model*>(handle);
  Layer& layer = m.layers.emplace_back();
  layer.input_norm = from->input_norm;
  layer.post_norm = from->post_norm;
  layer.q_norm = from->q_norm;
  layer.k_norm = from->k_norm;
  layer.window = from->window;
  layer.cache = {static_cast<uint32_t*>(from->keys), static_cast<uint32_t*>(from->values)};
  take(m, layer.qkv, from->qkv);
  take(m, layer.out, from->out);
  take(m, layer.up, from->up);
  take(m, layer.down, from->down);
}

void fs_set_head(void* handle, const FsNorm* norm, const FsLinear* lm_head) {
  Model& m = *static_cast<Model*>(handle);
  m.norm = *norm;
  take(m, m.lm_head, *lm_head);
}

void fs_step(void* handle, const FsStep* step) {
  Model& m = *static_cast<Model*>(handle);
  if (m.config.bf16)
    run<Bf16>(m, *step);
  else
    run<F32>(m, *step);
}

void fs_destroy(void* handle) { delete static_cast<Model*>(handle); }
}
