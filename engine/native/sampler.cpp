// From the logits of a row to its next token: adjustments, temperature, top-k, top-p, min-p, the draw; log probabilities.
//
// The law is that of transformers' warpers (engine/sampling/sampler.py is the same by torch). One pass over a row finds its
// maxima, a second one sums weights where all tokens have a part in that; what top-k, top-p and min-p leave is collected, not
// sorted. A weight is a float32, 2^((x - top) * scale); sums of weights are float64 in one order, the same for every width of a
// register and every number of threads (ADR 94).
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "lanes.h"
#include "parts.h"

namespace farsight {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr int kSumLanes = 16;       // weight i of a block is added to lane i % 16, in every build
constexpr int kSumTokens = 512;     // tokens of a block
constexpr int kRunVectors = 16;     // vectors whose maxima are kept lane by lane
constexpr int kBins = 256;          // of a histogram of candidates
constexpr size_t kFew = 32;            // candidates that are sorted
constexpr float kNoLogprob = -9999.0f;  // in place of what no JSON can say

typedef float f32h __attribute__((vector_size(2 * kWidth)));
typedef double f64v __attribute__((vector_size(4 * kWidth)));

inline f32v load_or(const float* from, int count, float rest) {
  if (count >= kWidth) return load<f32v>(from);
  f32v v = splat(rest);
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

// A bit for each lane of a that is at least that of b.
inline uint32_t at_least(f32v a, f32v b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)(a >= b));
#else
  const i32v found = a >= b;
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint32_t(found[i] & 1) << i;
  return bits;
#endif
}

// Tokens that may be drawn, in order of their ids.
struct Candidates {
  int count = 0;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

  // Keeps those for which keeps(index) holds.
  template <class Keeps>
  void filter(const Keeps& keeps) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if (!keeps(i)) continue;
      x[kept] = x[i], weights[kept] = weights[i], ids[kept] = ids[i];
      ++kept;
    }
    count = kept;
  }
};

// Kept from row to row: fresh memory would cost page faults.
struct RowScratch {
  std::vector<float> row, maxima, ranked;
  std::vector<double> sums;
  std::vector<int32_t> rest;
  Candidates candidates;
};

// 2^x of x up to 0; 0 below -126. The polynomial is that of `exp`.
inline f32v exp2_below_1(f32v x) {
  const f32v bounded = max(x, splat(-126.0f));
  const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
  const f32v whole = bounded + magic;
  const f32v f = bounded - (whole - magic);
  f32v p = splat(1.535336188319500e-4f);
  for (const float next : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                           6.931472028550421e-1f, 1.0f})
    p = fma(p, f, splat(next));
  const i32v result = (i32v)p + ((i32v)whole << 23);
  return x < -126.0f ? f32v{} : (f32v)result;
}

constexpr double kLog2E = 1.4426950408889634;

// A row whose likeliest token is known. Weights are relative to its own.
struct DrawnRow {
  const float* x;
  int n;
  float top, scale;  // scale: log2(e) / temperature
  RowScratch& scratch;

  f32v weight(f32v logits) const { return exp2_below_1((logits - top) * scale); }
};

// Finds the largest logit and, lane by lane, those of runs of kRunVectors vectors. Returns NaN or an infinity if the row has
// no likeliest token.
inline float find_maxima(const float* x, int n, std::vector<float>& maxima) {
  constexpr int kRun = kRunVectors * kWidth;
  maxima.resize(size_t(n + kRun - 1) / kRun * kWidth);
  f32v top = splat(-kInf);
  i32v nans = {};
  float* to = maxima.data();
  for (int first = 0; first < n; first += kRun, to += kWidth) {
    const int end = std::min(n, first + kRun);
    f32v highest = splat(-kInf), other = highest;
    int i = first;
    for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
      const f32v a = load<f32v>(x + i), b = load<f32v>(x + i + kWidth);
      nans |= (a != a) | (b != b);
      highest = max(a, highest), other = max(b, other);
    }
    for (; i < end; i += kWidth) {
      const f32v v = load_or(x + i, end - i, -kInf);
      nans |= v != v;
      highest = max(v, highest);
    }
    highest = max(highest, other);
    store(to, highest);
    top = max(highest, top);
  }
  int32_t lacks = 0;
  for (int lane = 0; lane < kWidth; ++lane) lacks |= nans[lane];
  return lacks ? std::numeric_limits<float>::quiet_NaN() : largest(top);
}

// The lowest id of those with the largest logit.
inline int first_of_best(const float* x, int n, float top, const std::vector<float>& maxima) {
  const auto run = std::find(maxima.begin(), maxima.end(), top) - maxima.begin();
  return int(std::find(x + run / kWidth * kRunVectors * kWidth, x + n, top) - x);
}

// The k-th largest of n values, which change their places.
inline float kth_largest(float* values, int n, int k) {
  std::nth_element(values, values + k - 1, values + n, std::greater<float>());
  return values[k - 1];
}

// A value that at least k logits reach, close to the k-th largest. Groups of tokens that have none in common hold at least k
// logits no smaller than the k-th largest of their maxima.
inline float least_of_best(int k, RowScratch& s) {
  const int runs = int(s.maxima.size()) / kWidth;
  if (k > runs * kWidth) return -kLargest;
  const int groups = std::min(runs, (8 * k + kWidth - 1) / kWidth);
  s.ranked.assign(s.maxima.begin(), s.maxima.begin() + groups * kWidth);
  for (int run = groups; run < runs; ++run) {
    float* to = s.ranked.data() + run % groups * kWidth;
    store(to, max(load<f32v>(s.maxima.data() + run * kWidth), load<f32v>(to)));
  }
  return std::max(-kLargest, kth_largest(s.ranked.data(), groups * kWidth, k));
}

// Makes candidates of the tokens whose logits are at least `least`.
inline void collect(const DrawnRow& row, float least) {
  constexpr int kRun = kRunVectors * kWidth;
  Candidates& to = row.scratch.candidates;
  for (auto* each : {&to.x, &to.weights}) each->resize(std::max(each->size(), size_t(row.n) + kWidth));
  to.ids.resize(std::max(to.ids.size(), size_t(row.n) + kWidth));
  const f32v bound = splat(least);
  const float* maxima = row.scratch.maxima.data();
  float* xs = to.x.data();
  int32_t* ids = to.ids.data();
  int count = 0;
#ifdef __AVX512F__
  const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#endif
  for (int first = 0; first < row.n; first += kRun, maxima += kWidth) {
    if (!at_least(load<f32v>(maxima), bound)) continue;
    const int end = std::min(row.n, first + kRun);
    for (int i = first; i < end; i += kWidth) {
      const f32v v = load_or(row.x + i, end - i, -kInf);
      uint32_t found = at_least(v, bound);
#ifdef __AVX512F__
      _mm512_storeu_ps(xs + count, _mm512_maskz_compress_ps(__mmask16(found), (__m512)v));
      _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(__mmask16(found), _mm512_add_epi32(steps, _mm512_set1_epi32(i))));
      count += __builtin_popcount(found);
#else
      for (; found; found &= found - 1) {
        const int at = i + __builtin_ctz(found);
        xs[count] = row.x[at], ids[count++] = at;
      }
#endif
    }
  }
  to.count = count;
}

// Adds up the weights of up to kSumTokens logits; then the upper half of the lanes to the lower half, down to one.
inline double sum_block(const DrawnRow& row, const float* x, int n) {
  constexpr int kVectors = kSumLanes / kWidth;
  f64v sums[2 * kVectors] = {};
  const auto add = [&](const float* from) {
    for (int v = 0; v < kVectors; ++v) {
      const f32v weights = row.weight(load<f32v>(from + v * kWidth));
      f32h halves[2];
      std::memcpy(halves, &weights, sizeof weights);
      for (int half = 0; half < 2; ++half) sums[2 * v + half] += __builtin_convertvector(halves[half], f64v);
    }
  };
  int i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) add(x + i);
  if (i < n) {
    float rest[kSumLanes];
    std::fill_n(std::copy(x + i, x + n, rest), kSumLanes - (n - i), -kInf);
    add(rest);
  }
  double lanes[kSumLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int half = kSumLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Adds up the weights of n logits, block by block; keeps those of the blocks.
inline double sum_weights(const DrawnRow& row, const float* x, int n) {
  std::vector<double>& sums = row.scratch.sums;
  sums.clear();
  double total = 0;
  for (int first = 0; first < n; first += kSumTokens) {
    sums.push_back(sum_block(row, x + first, std::min(kSumTokens, n - first)));
    total += sums.back();
  }
  return total;
}

// Inverts the cumulative distribution of n logits, at least one of them with a weight: returns the index of the first one at
// which the sum exceeds uniform * total, or the last with a weight where rounding leaves none.
inline int invert(const DrawnRow& row, const float* x, int n, double uniform) {
  const double target = uniform * sum_weights(row, x, n);
  const std::vector<double>& sums = row.scratch.sums;
  double before = 0, sum = 0;
  size_t block = 0;
  for (size_t i = 0; i < sums.size() && sum <= target; ++i) {
    if (sums[i] > 0) block = i, before = sum;
    sum += sums[i];
  }
  const int first = int(block) * kSumTokens, count = std::min(kSumTokens, n - first);
  float weights[kSumTokens + kWidth];
  for (int i = 0; i < count; i += kWidth) store(weights + i, row.weight(load_or(x + first + i, count - i, -kInf)));
  int found = 0;
  for (int i = 0; i < count && before <= target; ++i) {
    if (weights[i] > 0) found = i;
    before += weights[i];
  }
  return first + found;
}

inline void weigh_candidates(const DrawnRow& row) {
  Candidates& c = row.scratch.candidates;
  for (int i = 0; i < c.count; i += kWidth) store(c.weights.data() + i, row.weight(load<f32v>(c.x.data() + i)));
}

// A logit that all tokens of at least this weight reach; somewhat less than the least such one.
inline float logit_of(const DrawnRow& row, double weight) {
  const double relative = (std::log2(weight) - 1e-3) / row.scale;  // the slack is far beyond what rounds in a weight
  return std::nextafter(float(std::max(-double(kLargest), row.top + relative)), -kLargest);
}

// Makes candidates of all tokens that are in the nucleus, and of few others. Tokens that have less than a certain weight are
// not in it where those that have it leave no more than the tail; and in any case where that weight is tail * total / n, since
// all n of them together would have no more than the tail.
inline void collect_nucleus(const DrawnRow& row, double total, double tail) {
  const Candidates& c = row.scratch.candidates;
  const double mean = total / row.n;
  for (double weight = mean;; weight /= 16) {
    collect(row, logit_of(row, std::max(weight, tail * mean)));
    if (weight <= tail * mean || total - sum_weights(row, c.x.data(), c.count) <= tail * total) return;
  }
}

// Keeps of the candidates the likeliest ones until those left have at most `tail` of the total mass. Of tokens with the same
// logit the one with the highest id counts as the likeliest, as in a stable sort in ascending order.
inline void keep_nucleus(const DrawnRow& row, double total, double tail) {
  Candidates& c = row.scratch.candidates;
  weigh_candidates(row);
  std::vector<int32_t>& rest = row.scratch.rest;  // among which the last token that stays is, in order of ids
  rest.resize(c.count);
  for (int i = 0; i < c.count; ++i) rest[i] = i;
  const float *x = c.x.data(), *weights = c.weights.data();
  const auto is_rest_dropped = [&](double ahead) { return total - ahead <= tail * total; };
  double ahead = 0;
  for (;;) {
    float low = x[rest[0]], high = low;
    for (const int32_t i : rest) low = std::min(low, x[i]), high = std::max(high, x[i]);
    if (low == high || rest.size() <= kFew) {
      std::reverse(rest.begin(), rest.end());
      if (low != high) std::stable_sort(rest.begin(), rest.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
      break;
    }
    const double factor = (kBins - 1) / (double(high) - low);
    const auto bin_of = [&](float logit) { return int((double(high) - logit) * factor); };
    double masses[kBins] = {};
    for (const int32_t i : rest) masses[bin_of(x[i])] += weights[i];
    int bin = 0;
    while (bin < bin_of(low) && !is_rest_dropped(ahead + masses[bin])) ahead += masses[bin++];
    rest.erase(std::remove_if(rest.begin(), rest.end(), [&](int32_t i) { return bin_of(x[i]) != bin; }), rest.end());
  }
  int32_t last = rest[0];
  for (const int32_t i : rest) {
    if (ahead > 0 && is_rest_dropped(ahead)) break;
    last = i;
    ahead += weights[i];
  }
  const float least = x[last];
  const int32_t id = c.ids[last];
  c.filter([&](int i) { return x[i] > least || (x[i] == least && c.ids[i] >= id); });
}

// A uniform number in [0, 1) of 53 bits; `counter_uniform` of engine/sampling/sampler.py.
inline double counter_uniform(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  };
  return double(mix(mix(seed + kGolden) + uint64_t(position + 1) * kGolden) >> 11) * 0x1p-53;
}

// Copies a row; tokens without their bit in `mask` become -inf. NaN stays, so that the row tells.
inline void copy_masked(const float* x, int n, const uint8_t* mask, float* to) {
  i32v lane_bits;
  for (int i = 0; i < kWidth; ++i) lane_bits[i] = 1 << i;
  for (int i = 0; i < n; i += kWidth) {
    uint16_t bits;
    std::memcpy(&bits, mask + i / 16 * 2, sizeof bits);
    const i32v allowed = ((i32v{} + int32_t(bits >> i % 16)) & lane_bits) != 0;
    const f32v v = load_first(x + i, n - i);
    store_first(to + i, (allowed | (v != v)) ? v : splat(-kInf), n - i);
  }
}

// The logits as the request changes them (engine/sampling/logit_adjustments.py says how). Ids that the vocabulary lacks
// change nothing.
inline const float* adjust(const FsDraw& d, const float* x, int n, std::vector<float>& row) {
  if (!d.mask && !d.num_seen && !d.num_biased && !d.num_allowed && !d.num_forbidden) return x;
  row.resize(n);
  if (d.mask)
    copy_masked(x, n, d.mask, row.data());
  else
    std::copy_n(x, n, row.data());
  const auto is_token = [&](int32_t id) { return id >= 0 && id < n; };
  for (int64_t i = 0; i < d.num_seen; ++i) {
    if (!is_token(d.seen[i])) continue;
    float& logit = row[d.seen[i]];
    const float either[] = {logit / d.repetition, logit * d.repetition};  // both: signs are hard to foresee
    logit = either[logit < 0] - d.presence * float(d.counts[i] > 0);
    logit -= d.frequency * float(d.counts[i]);
  }
  for (int64_t i = 0; i < d.num_biased; ++i)
    if (is_token(d.biased[i])) row[d.biased[i]] += d.biases[i];
  if (d.num_allowed) {
    std::vector<float> kept;
    for (int64_t i = 0; i < d.num_allowed; ++i) kept.push_back(is_token(d.allowed[i]) ? row[d.allowed[i]] : 0.0f);
    std::fill(row.begin(), row.end(), -kInf);
    for (int64_t i = 0; i < d.num_allowed; ++i)
      if (is_token(d.allowed[i])) row[d.allowed[i]] = kept[i];
  }
  for (int64_t i = 0; i < d.num_forbidden; ++i)
    if (is_token(d.forbidden[i])) row[d.forbidden[i]] = -kInf;
  return row.data();
}

// Makes candidates of the k likeliest tokens and those that tie with the last of them.
inline void keep_top_k(const DrawnRow& row, int k) {
  Candidates& c = row.scratch.candidates;
  collect(row, least_of_best(k, row.scratch));
  if (c.count <= k) return;
  row.scratch.ranked.assign(c.x.begin(), c.x.begin() + c.count);
  const float least = kth_largest(row.scratch.ranked.data(), c.count, k);
  c.filter([&](int i) { return c.x[i] >= least; });
}

// Draws the token of one row; -1 if it has none: a logit is NaN or +inf, or all are -inf.
inline int64_t draw_row(const FsDraw& d, const float* logits, int n, RowScratch& s) {
  // What is forbidden hides no NaN: the model is at fault then, whatever the request forbids.
  if ((d.num_allowed || d.num_forbidden) && !std::isfinite(find_maxima(logits, n, s.maxima))) return -1;
  const float* x = adjust(d, logits, n, s.row);
  const float top = find_maxima(x, n, s.maxima);
  if (!std::isfinite(top)) return -1;
  if (d.temperature == 0) return first_of_best(x, n, top, s.maxima);
  // 0 * inf and inf * 0 would be NaN.
  const float scale = float(std::clamp(kLog2E / d.temperature, 1e-44, double(kLargest)));
  const DrawnRow row{x, n, top, scale, s};
  Candidates& c = s.candidates;
  bool listed = false;
  if (d.top_k > 0 && d.top_k < n) {
    keep_top_k(row, d.top_k);
    listed = true;
  }
  if (d.top_p < 1) {
    const double tail = 1 - d.top_p;
    const double total = listed ? sum_weights(row, c.x.data(), c.count) : sum_weights(row, x, n);
    if (!listed) collect_nucleus(row, total, tail);
    keep_nucleus(row, total, tail);
    listed = true;
  }
  if (d.min_p > 0) {
    if (!listed) collect(row, logit_of(row, d.min_p));
    weigh_candidates(row);
    c.filter([&](int i) { return c.weights[i] >= float(d.min_p); });
    listed = true;
  }
  const double uniform = counter_uniform(d.seed, d.position);
  return listed ? c.ids[invert(row, c.x.data(), c.count, uniform)] : invert(row, x, n, uniform);
}

// Writes the log probability of a token, then those of the `num_top` likeliest; the ids of the latter to `ids`. Of tokens with
// the same logit the one with the lowest id comes first.
inline void log_row(const float* x, int n, int64_t token, int num_top, RowScratch& s, int32_t* ids, float* values) {
  const float top = find_maxima(x, n, s.maxima);
  num_top = std::min(num_top, n);
  if (!std::isfinite(top)) {
    std::fill_n(values, 1 + num_top, kNoLogprob);
    for (int i = 0; i < num_top; ++i) ids[i] = i;
    return;
  }
  const DrawnRow row{x, n, top, float(kLog2E), s};
  const double of_top = -std::log(sum_weights(row, x, n));
  const auto logprob = [&](int64_t id) {
    return x[id] < -kLargest ? kNoLogprob : float(double(x[id]) - top + of_top);
  };
  values[0] = logprob(token);
  if (!num_top) return;
  keep_top_k(row, num_top);
  const Candidates& c = s.candidates;
  s.rest.resize(c.count);
  for (int i = 0; i < c.count; ++i) s.rest[i] = i;
  std::stable_sort(s.rest.begin(), s.rest.end(), [&](int32_t a, int32_t b) { return c.x[a] > c.x[b]; });
  int found = std::min(num_top, c.count);
  for (int i = 0; i < found; ++i) ids[i] = c.ids[s.rest[i]];
  for (int id = 0; found < num_top; ++id)  // fewer tokens than wanted are possible at all
    if (x[id] < -kLargest) ids[found++] = id;
  for (int i = 0; i < num_top; ++i) values[1 + i] = logprob(ids[i]);
}

// Calls task(i, scratch) for each 0 <= i < count: by the threads of a team if there is one and enough to do.
template <class Task>
void share_rows(Team* team, int count, int64_t vocab, const Task& task) {
  constexpr int64_t kWorthwhile = 1 << 16;  // logits: below that, to wake a thread takes longer
  const auto run = [&](int i) {
    thread_local RowScratch scratch;
    task(i, scratch);
  };
  if (team && count * vocab >= kWorthwhile)
    team->share(count, run);
  else
    for (int i = 0; i < count; ++i) run(i);
}

void sample_rows(Team* team, const FsSample& s) {
  share_rows(team, s.num_rows, s.vocab, [&](int i, RowScratch& scratch) {
    s.tokens[i] = draw_row(s.draws[i], s.logits + s.draws[i].row * s.vocab, s.vocab, scratch);
  });
}

void log_rows(Team* team, const FsLog& s) {
  share_rows(team, s.num_rows, s.vocab, [&](int i, RowScratch& scratch) {
    log_row(s.logits + s.rows[i] * s.vocab, s.vocab, s.tokens[i], s.num_top[i], scratch, s.ids + int64_t(i) * s.width,
            s.values + int64_t(i) * (s.width + 1));
  });
}

}  // namespace farsight
