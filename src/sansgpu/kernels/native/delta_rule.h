// Code shared by the passes of the gated delta rule and of linear attention with decays; kernels/recurrent/delta_rule.py has the
// reference.
//
// N tokens, S sequences, H value heads, K key heads, d features of queries and keys, e of values. A state (d, e) is the
// memory of a head. Tokens are computed in chunks of CHUNK: within a chunk as attention with decaying scores, between
// chunks by the state (arXiv 2406.06484, 2412.06464 and 2405.21060). All sums are fp32 and have a fixed order, so that
// results do not depend on the number of threads.
#pragma once

#include "parallel.h"
#include "values.h"

namespace sansgpu {

constexpr int64_t CHUNK = 64;            // tokens of a chunk
constexpr int64_t SOLVED = 16;       // rows of a triangular system that are solved one by one
constexpr int64_t MIN_UNITS = 16;    // units of work per sequence, if there are as many heads
constexpr float NORM_EPS = 1e-6f;    // of L2 norms, as in transformers and flash-linear-attention

// The value heads of a unit of work, which share a key head.
struct HeadRange {
  int64_t sequence, key_head, part, first, end;
};

// Divides the value heads of each key head into parts, because some models have only one key head.
struct DeltaUnits {
  const DeltaRule& p;
  int64_t group, parts;
  explicit DeltaUnits(const DeltaRule& p)
      : p(p), group(p.H / p.K), parts(std::min(group, std::max<int64_t>(1, MIN_UNITS / p.K))) {}
  int64_t count() const { return p.S * p.K * parts; }
  HeadRange of(int64_t unit) const {
    const int64_t part = unit % parts, key_head = unit / parts % p.K, first = key_head * group;
    return {unit / parts / p.K, key_head, part, first + part * group / parts, first + (part + 1) * group / parts};
  }
  int64_t most_heads() const { return divide_up(group, parts); }
};

inline void scale_rows(int64_t rows, int64_t columns, const float* factors, const float* from, float* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; ++c) to[i * columns + c] = factors[i] * from[i * columns + c];
}

template <typename T>
void load_row(const T* from, int64_t count, float* to) {
  for (int64_t c = 0; c < count; ++c) to[c] = load(from + c);
}

// The queries and keys of a chunk, and their products, which the heads of a unit share.
template <typename T>
class ChunkKeys {
 public:
  ChunkKeys(const DeltaRule& p, float scale)
      : q(CHUNK * p.d), k(CHUNK * p.d), kt(p.d * CHUNK), qk(CHUNK * CHUNK), kk(CHUNK * CHUNK), q_norms(CHUNK),
        k_norms(CHUNK), p_(p), scale_(scale) {}

  void load(int64_t start, int64_t rows, int64_t key_head) {
    const int64_t d = p_.d, place = key_head * d;
    for (int64_t i = 0; i < rows; ++i) {
      q_norms[i] = load_normed(p_.q, (start + i) * p_.q_time + place, q + i * d);
      k_norms[i] = load_normed(p_.k, (start + i) * p_.k_time + place, k + i * d);
      for (int64_t c = 0; c < d; ++c) q[i * d + c] *= scale_;
    }
    transpose<float>(k, d, rows, d, kt, CHUNK);
    product<float>(rows, rows, d, q, d, kt, CHUNK, qk, CHUNK, false);
    if (p_.beta) product<float>(rows, rows, d, k, d, kt, CHUNK, kk, CHUNK, false);
  }

  // Converts the gradients of `rows` loaded queries or keys to those of the inputs.
  void undo_norms(int64_t rows, const float* normed, const float* norms, float factor, float* grad) const {
    const int64_t d = p_.d;
    for (int64_t i = 0; i < rows; ++i, normed += d, grad += d) {
      // Queries were scaled after their norm: `factor` is that scale, and 1 for keys.
      float along = 0.0f;
      if (p_.normalized) along = sum_of(d, [&](int64_t c) { return normed[c] * grad[c]; }) / (factor * factor);
      for (int64_t c = 0; c < d; ++c) grad[c] = norms[i] * (factor * grad[c] - along * normed[c] * factor);
    }
  }

  Buffer<float> q, k, kt, qk, kk, q_norms, k_norms;

 private:
  // Loads a row and divides it by its L2 norm if that is wanted; returns the factor.
  float load_normed(const void* from, int64_t place, float* to) const {
    load_row(static_cast<const T*>(from) + place, p_.d, to);
    if (!p_.normalized) return 1.0f;
    const float factor = 1.0f / std::sqrt(sum_of(p_.d, [&](int64_t c) { return to[c] * to[c]; }) + NORM_EPS);
    for (int64_t c = 0; c < p_.d; ++c) to[c] *= factor;
    return factor;
  }

  const DeltaRule& p_;
  const float scale_;
};

// What one value head adds to the tokens of a chunk.
template <typename T>
class ChunkValues {
 public:
  explicit ChunkValues(const DeltaRule& p)
      : sums(CHUNK), since(CHUNK), until(CHUNK), beta(CHUNK), scores(CHUNK * CHUNK), system(CHUNK * CHUNK),
        rest(CHUNK * p.e), x(CHUNK * p.e), p_(p), decays_(CHUNK) {}

  // Loads gates and values and computes what the chunk writes to the state, x (rows, e): the values, or with the delta
  // rule what the state does not predict of them. `before` (d, e) is the state before the chunk.
  void load(const ChunkKeys<T>& keys, int64_t start, int64_t rows, int64_t head, const float* before) {
    const int64_t d = p_.d, e = p_.e;
    float sum = 0.0f;
    for (int64_t i = 0; i < rows; ++i) {
      sums[i] = (sum += p_.decay[(start + i) * p_.H + head] * LOG2E);
      beta[i] = p_.beta ? p_.beta[(start + i) * p_.H + head] : 1.0f;
    }
    for (int64_t i = 0; i < rows; ++i) {
      since[i] = exp2_nonpositive(sums[i]);
      until[i] = exp2_nonpositive(sum - sums[i]);
    }
    whole = exp2_nonpositive(sum);
    for (int64_t i = 0; i < rows; ++i) {
      decays(i);
      weigh(i, rows, 1.0f, keys.qk, i + 1, scores);
      if (p_.beta) weigh(i, rows, -beta[i], keys.kk, i, system);
      load_row(static_cast<const T*>(p_.v) + (start + i) * p_.v_time + head * e, e, rest + i * e);
    }
    if (!p_.beta) {
      std::copy_n(static_cast<float*>(rest), rows * e, static_cast<float*>(x));
      return;
    }
    product<float>(rows, e, d, keys.k, d, before, e, x, e, false);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = i * e; c < (i + 1) * e; ++c) {
        rest[c] -= since[i] * x[c];
        x[c] = beta[i] * rest[c];
      }
    solve(rows);
  }

  // Computes the decays of row i from each earlier token to token i.
  const float* decays(int64_t i) {
    const float* before = sums;
    float* to = decays_;
    for (int64_t j = 0; j <= i; ++j) to[j] = exp2_nonpositive(before[i] - before[j]);
    return to;
  }

  // (CHUNK,): the decay from the start of the chunk to each token, in log2 and as a factor, and from each token to the
  // end.
  Buffer<float> sums, since, until, beta;
  float whole = 0.0f;  // the decay of the whole chunk
  // (CHUNK, CHUNK): decayed scores of each query, and the strictly lower triangular matrix L of the system
  // (I - L) x = beta rest
  Buffer<float> scores, system;
  Buffer<float> rest, x;  // (CHUNK, e)

 private:
  // Row i of a matrix: `factor` times the decayed products with the first `count` tokens, then zeros.
  void weigh(int64_t i, int64_t rows, float factor, const float* products, int64_t count, float* to) const {
    const float* decay = decays_;
    for (int64_t j = 0; j < count; ++j) to[i * CHUNK + j] = factor * decay[j] * products[i * CHUNK + j];
    std::fill(to + i * CHUNK + count, to + i * CHUNK + rows, 0.0f);
  }

  // Solves (I - system) x = x in place.
  void solve(int64_t rows) {
    const int64_t e = p_.e;
    for (int64_t start = 0; start < rows; start += SOLVED) {
      const int64_t end = std::min(start + SOLVED, rows);
      if (start > 0) product<float>(end - start, e, start, system + start * CHUNK, CHUNK, x, e, x + start * e, e, true);
      for (int64_t i = start + 1; i < end; ++i)
        for (int64_t j = start; j < i; ++j) {
          const float factor = system[i * CHUNK + j];
          for (int64_t c = 0; c < e; ++c) x[i * e + c] += factor * x[j * e + c];
        }
    }
  }

  const DeltaRule& p_;
  Buffer<float> decays_;
};

// Adds to a state (d, e) what a chunk writes to it. `scaled` (d, CHUNK) is scratch memory.
template <typename T>
void update_state(const DeltaRule& p, const ChunkKeys<T>& keys, const ChunkValues<T>& values, int64_t rows,
                  float* scaled, float* state) {
  for (int64_t c = 0; c < p.d; ++c)
    for (int64_t j = 0; j < rows; ++j) scaled[c * CHUNK + j] = keys.kt[c * CHUNK + j] * values.until[j];
  for (int64_t i = 0; i < p.d * p.e; ++i) state[i] *= values.whole;
  product<float>(p.d, p.e, rows, scaled, CHUNK, values.x, p.e, state, p.e, true);
}

}  // namespace sansgpu
