// Backward pass of the gated delta rule; see delta_rule.h.

#include "delta_rule.h"

namespace sansgpu {
namespace {

// The gradients. Those of queries and keys are fp32 sums over the value heads of a unit, (parts, N, K, d).
struct Gradients {
  const void* out;
  float *q, *k;
  void* v;
  float *decay, *beta;
};

// Computes the gradients of the heads of a unit, from the last chunk to the first. The states before the chunks are
// computed again first, because keeping those of all heads would take more memory than all other activations.
template <typename T>
class Backward {
 public:
  Backward(const DeltaRule& p, float scale, int64_t heads, int64_t longest, const Gradients& grads)
      : p_(p), scale_(scale), state_(p.d * p.e), grads_(grads), keys_(p, scale), values_(p),
        states_(std::max<int64_t>(1, divide_up(longest, CHUNK)) * heads * state_), state_grads_(heads * state_),
        turned_(p.d * std::max(CHUNK, p.e)), qt_(p.d * CHUNK), scaled_(CHUNK * p.d), q_grad_(CHUNK * p.d),
        row_(CHUNK * p.d), column_(CHUNK * p.d), q_sum_(CHUNK * p.d), k_sum_(CHUNK * p.d), out_(CHUNK * p.e),
        decayed_(CHUNK * p.e), x_grad_(CHUNK * p.e), xt_(p.e * CHUNK), first_(CHUNK * CHUNK), second_(CHUNK * CHUNK),
        turned_scores_(CHUNK * CHUNK), sums_(CHUNK) {}

  void run(const HeadRange& heads) {
    const int64_t begin = p_.starts[heads.sequence], end = p_.starts[heads.sequence + 1];
    const int64_t chunks = divide_up(end - begin, CHUNK), count = heads.end - heads.first;
    keep_states(heads, begin, end);
    std::fill_n(static_cast<float*>(state_grads_), count * state_, 0.0f);
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t start = begin + chunk * CHUNK, rows = std::min(CHUNK, end - start);
      keys_.load(start, rows, heads.key_head);
      transpose<float>(keys_.q, p_.d, rows, p_.d, qt_, CHUNK);
      std::fill_n(static_cast<float*>(q_sum_), rows * p_.d, 0.0f);
      std::fill_n(static_cast<float*>(k_sum_), rows * p_.d, 0.0f);
      for (int64_t h = 0; h < count; ++h)
        compute(start, rows, heads.first + h, states_ + (chunk * count + h) * state_, state_grads_ + h * state_);
      keys_.undo_norms(rows, keys_.q, keys_.q_norms, scale_, q_sum_);
      keys_.undo_norms(rows, keys_.k, keys_.k_norms, 1.0f, k_sum_);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t place = ((heads.part * p_.N + start + i) * p_.K + heads.key_head) * p_.d;
        std::copy_n(q_sum_ + i * p_.d, p_.d, grads_.q + place);
        std::copy_n(k_sum_ + i * p_.d, p_.d, grads_.k + place);
      }
    }
  }

 private:
  // Computes the states before each chunk, (chunks, heads, d, e).
  void keep_states(const HeadRange& heads, int64_t begin, int64_t end) {
    const int64_t count = heads.end - heads.first;
    float* states = states_;
    std::fill_n(states, count * state_, 0.0f);
    for (int64_t start = begin; start + CHUNK < end; start += CHUNK, states += count * state_) {
      keys_.load(start, CHUNK, heads.key_head);
      std::copy_n(states, count * state_, states + count * state_);
      for (int64_t h = 0; h < count; ++h) {
        float* state = states + (count + h) * state_;
        values_.load(keys_, start, CHUNK, heads.first + h, state);
        update_state(p_, keys_, values_, CHUNK, turned_, state);
      }
    }
  }

  // Computes the gradients of a chunk of one head. `grad` (d, e) is that of the state after the chunk, and becomes that
  // of `before`, the state before it.
  void compute(int64_t start, int64_t rows, int64_t head, const float* before, float* grad) {
    const int64_t d = p_.d, e = p_.e;
    values_.load(keys_, start, rows, head, before);
    for (int64_t i = 0; i < rows; ++i)
      load_row(static_cast<const T*>(grads_.out) + ((start + i) * p_.H + head) * e, e, out_ + i * e);
    const float last = after_terms(rows, before, grad);
    scale_rows(rows, e, values_.since, out_, decayed_);
    transpose<float>(before, e, d, e, turned_, d);
    product<float>(rows, d, e, decayed_, e, turned_, d, q_grad_, d, false);
    for (int64_t i = 0; i < rows; ++i)
      sums_[i] += sum_of(d, [&](int64_t c) { return keys_.q[i * d + c] * q_grad_[i * d + c]; });
    for (int64_t i = 0; i < state_; ++i) grad[i] *= values_.whole;
    product<float>(d, e, rows, qt_, CHUNK, decayed_, e, grad, e, true);
    score_terms(rows);
    if (p_.beta)
      system_terms(start, rows, head, grad);
    else
      std::fill_n(static_cast<float*>(row_), rows * d, 0.0f);
    for (int64_t i = 0; i < rows; ++i)
      store_row(static_cast<T*>(grads_.v) + ((start + i) * p_.H + head) * e, x_grad_ + i * e, e);
    add_sums(start, rows, head, last);
  }

  // The gradients through the state after the chunk: of x, and of the keys that write to it. Returns the gradient of
  // the chunk's whole decay, in log, and begins `sums_`, the gradients of the sum of the decays up to each token. These
  // are computed term by term, because differences of large terms would be inexact where decays are strong.
  float after_terms(int64_t rows, const float* before, const float* grad) {
    const int64_t d = p_.d, e = p_.e;
    scale_rows(rows, d, values_.until, keys_.k, scaled_);
    product<float>(rows, e, d, scaled_, d, grad, e, x_grad_, e, false);
    transpose<float>(grad, e, d, e, turned_, d);
    product<float>(rows, d, e, values_.x, e, turned_, d, column_, d, false);
    scale_rows(rows, d, values_.until, column_, column_);
    float last = values_.whole * sum_of(state_, [&](int64_t i) { return grad[i] * before[i]; });
    for (int64_t i = 0; i < rows; ++i) {
      const float term = sum_of(d, [&](int64_t c) { return keys_.k[i * d + c] * column_[i * d + c]; });
      sums_[i] = -term;
      last += term;
    }
    return last;
  }

  // Adds the gradients of the decays from earlier tokens j to token i, from `grads`, that of their products before the
  // decay times the decay, and these products.
  void add_decays(int64_t i, const float* grads, const float* products) {
    float* sums = sums_;
    sums[i] += sum_of(i, [&](int64_t j) { return grads[j] * products[j]; });
    for (int64_t j = 0; j < i; ++j) sums[j] -= grads[j] * products[j];
  }

  // The gradients through the scores: of x, queries and keys.
  void score_terms(int64_t rows) {
    const int64_t d = p_.d, e = p_.e;
    transpose<float>(values_.scores, CHUNK, rows, rows, turned_scores_, CHUNK);
    product<float>(rows, e, rows, turned_scores_, CHUNK, out_, e, x_grad_, e, true);
    transpose<float>(values_.x, e, rows, e, xt_, CHUNK);
    product<float>(rows, rows, e, out_, e, xt_, CHUNK, first_, CHUNK, false);
    for (int64_t i = 0; i < rows; ++i) {
      const float* decays = values_.decays(i);
      for (int64_t j = 0; j <= i; ++j) first_[i * CHUNK + j] *= decays[j];
      add_decays(i, first_ + i * CHUNK, keys_.qk + i * CHUNK);
      std::fill(first_ + i * CHUNK + i + 1, first_ + i * CHUNK + rows, 0.0f);
    }
    product<float>(rows, d, rows, first_, CHUNK, keys_.k, d, q_grad_, d, true);
    transpose<float>(first_, CHUNK, rows, rows, turned_scores_, CHUNK);
    product<float>(rows, d, rows, turned_scores_, CHUNK, keys_.q, d, column_, d, true);
  }

  // The gradients through the triangular system of the delta rule, of which `x_grad_` becomes that of the values.
  // `turned_` is the transposed state before the chunk.
  void system_terms(int64_t start, int64_t rows, int64_t head, float* grad) {
    const int64_t d = p_.d, e = p_.e;
    transpose<float>(values_.system, CHUNK, rows, rows, turned_scores_, CHUNK);
    solve_transposed(rows);
    product<float>(rows, rows, e, x_grad_, e, xt_, CHUNK, second_, CHUNK, false);
    for (int64_t i = 0; i < rows; ++i) {
      const float* decays = values_.decays(i);
      const float beta = values_.beta[i];
      float* row = second_ + i * CHUNK;
      const float* products = keys_.kk + i * CHUNK;
      for (int64_t j = 0; j < i; ++j) row[j] *= -decays[j];
      std::fill(row + i, row + rows, 0.0f);
      grads_.beta[(start + i) * p_.H + head] =
          sum_of(e, [&](int64_t c) { return x_grad_[i * e + c] * values_.rest[i * e + c]; }) +
          sum_of(i, [&](int64_t j) { return row[j] * products[j]; });
      for (int64_t j = 0; j < i; ++j) row[j] *= beta;
      add_decays(i, row, products);
      for (int64_t c = i * e; c < (i + 1) * e; ++c) {
        x_grad_[c] *= beta;
        decayed_[c] = -values_.since[i] * x_grad_[c];
      }
    }
    product<float>(rows, d, e, decayed_, e, turned_, d, row_, d, false);
    for (int64_t i = 0; i < rows; ++i)
      sums_[i] += sum_of(d, [&](int64_t c) { return keys_.k[i * d + c] * row_[i * d + c]; });
    product<float>(rows, d, rows, second_, CHUNK, keys_.k, d, row_, d, true);
    transpose<float>(second_, CHUNK, rows, rows, turned_scores_, CHUNK);
    product<float>(rows, d, rows, turned_scores_, CHUNK, keys_.k, d, column_, d, true);
    product<float>(d, e, rows, keys_.kt, CHUNK, decayed_, e, grad, e, true);
  }

  // Solves (I - system)^T x = x_grad in place; `turned_scores_` is the transposed system.
  void solve_transposed(int64_t rows) {
    const int64_t e = p_.e;
    for (int64_t start = (rows - 1) / SOLVED * SOLVED; start >= 0; start -= SOLVED) {
      const int64_t end = std::min(start + SOLVED, rows);
      if (end < rows)
        product<float>(end - start, e, rows - end, turned_scores_ + start * CHUNK + end, CHUNK, x_grad_ + end * e, e,
                       x_grad_ + start * e, e, true);
      for (int64_t i = end - 2; i >= start; --i)
        for (int64_t j = i + 1; j < end; ++j) {
          const float factor = turned_scores_[i * CHUNK + j];
          for (int64_t c = 0; c < e; ++c) x_grad_[i * e + c] += factor * x_grad_[j * e + c];
        }
    }
  }

  // Adds to the sums over heads, and computes the gradients of the decays: a token's decay is a term of the sums up to
  // all later tokens of the chunk.
  void add_sums(int64_t start, int64_t rows, int64_t head, float last) {
    for (int64_t i = 0; i < rows * p_.d; ++i) {
      q_sum_[i] += q_grad_[i];
      k_sum_[i] += row_[i] + column_[i];
    }
    float sum = last;
    for (int64_t i = rows - 1; i >= 0; --i) grads_.decay[(start + i) * p_.H + head] = (sum += sums_[i]);
  }

  const DeltaRule& p_;
  const float scale_;
  const int64_t state_;  // values of a state
  const Gradients grads_;
  ChunkKeys<T> keys_;
  ChunkValues<T> values_;
  Buffer<float> states_, state_grads_, turned_, qt_, scaled_, q_grad_;
  Buffer<float> row_, column_;  // of keys as row i and as column j of products with the decay from j to i
  Buffer<float> q_sum_, k_sum_, out_, decayed_, x_grad_, xt_, first_, second_, turned_scores_, sums_;
};

template <typename T>
void backward(const DeltaRule& p, float scale, const Gradients& grads, void* q_grad, void* k_grad) {
  const DeltaUnits all(p);
  int64_t longest = 0;
  for (int64_t s = 0; s < p.S; ++s) longest = std::max(longest, p.starts[s + 1] - p.starts[s]);
  parallel_units(all.count(), [&](Units& units) {
    Backward<T> pass(p, scale, all.most_heads(), longest, grads);
    for (int64_t unit; units.draw(unit);) pass.run(all.of(unit));
  });
  const int64_t width = p.K * p.d, size = p.N * width;
  parallel_units(p.N, [&](Units& units) {
    Buffer<float> sum(width);
    for (int64_t unit; units.draw(unit);)
      for (const auto& [parts, to] : {std::pair(grads.q, q_grad), std::pair(grads.k, k_grad)}) {
        std::copy_n(parts + unit * width, width, static_cast<float*>(sum));
        for (int64_t part = 1; part < all.parts; ++part)
          for (int64_t c = 0; c < width; ++c) sum[c] += parts[part * size + unit * width + c];
        store_row(static_cast<T*>(to) + unit * width, static_cast<float*>(sum), width);
      }
  });
}

}  // namespace

// Returns the number of parts, whose gradients of queries and keys `delta_rule_backward` computes apart.
SANSGPU_KERNEL int64_t delta_rule_parts(const DeltaRule* inputs) { return DeltaUnits(*inputs).parts; }

// Computes the gradients of q and k (N, K, d), v (N, H, e), and decay and beta (N, H) from that of the output. The
// sequences must have begun with a state of zeros. `q_parts` and `k_parts` (parts, N, K, d) are scratch memory, and
// `beta_grad` is null if there is no beta.
SANSGPU_KERNEL void delta_rule_backward(const DeltaRule* inputs, double scale, const void* grad_out, float* q_parts,
                                        float* k_parts, void* q_grad, void* k_grad, void* v_grad, float* decay_grad,
                                        float* beta_grad) {
  const auto run = inputs->narrow ? backward<bf16> : backward<float>;
  run(*inputs, static_cast<float>(scale), {grad_out, q_parts, k_parts, v_grad, decay_grad, beta_grad}, q_grad, k_grad);
}

}  // namespace sansgpu
