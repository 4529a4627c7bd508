// The selective scan of Mamba (arXiv 2312.00752); kernels/recurrent/selective_scan.py has the reference.
//
// N tokens of S sequences, D channels, M states per channel. A unit of work is a block of channels, which it follows
// through all tokens, so that sums over tokens have a fixed order. States of a block are (M, CHANNELS).

#include "parallel.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t CHANNELS = 32;  // per block
constexpr int64_t STEPS = 32;     // tokens whose states the backward pass computes again together

// A block of channels.
template <typename T>
class Block {
 public:
  Block(const Scan& p, int64_t unit)
      : first(unit * CHANNELS), count(std::min(CHANNELS, p.D - first)), size(p.M * CHANNELS), rates(size), x(CHANNELS),
        step(CHANNELS), p_(p) {
    std::fill_n(static_cast<float*>(rates), size, 0.0f);
    std::fill_n(static_cast<float*>(x), CHANNELS, 0.0f);
    std::fill_n(static_cast<float*>(step), CHANNELS, 0.0f);
    for (int64_t c = 0; c < count; ++c)
      for (int64_t m = 0; m < p.M; ++m) rates[m * CHANNELS + c] = p.rates[(first + c) * p.M + m] * LOG2E;
  }

  void load_token(int64_t t) {
    const T* from = static_cast<const T*>(p_.x) + t * p_.x_time + first;
    for (int64_t c = 0; c < count; ++c) x[c] = load(from + c);
    std::copy_n(p_.steps + t * p_.D + first, count, static_cast<float*>(step));
  }

  // Computes the states after the loaded token t from those before it.
  void advance(int64_t t, const float* before, float* after) const {
    const float *values = x, *steps = step;
    for (int64_t m = 0; m < p_.M; ++m) {
      const float in = p_.in[t * p_.M + m];
      const float *rate = rates + m * CHANNELS, *old = before + m * CHANNELS;
      float* to = after + m * CHANNELS;
      for (int64_t c = 0; c < CHANNELS; ++c)
        to[c] = exp2_nonpositive(rate[c] * steps[c]) * old[c] + steps[c] * in * values[c];
    }
  }

  const int64_t first, count, size;
  Buffer<float> rates;    // (M, CHANNELS): A in log2
  Buffer<float> x, step;  // (CHANNELS,)

 private:
  const Scan& p_;
};

template <typename T>
void forward(const Scan& p, const float* initial, void* out, float* last) {
  parallel_each(divide_up(p.D, CHANNELS), [&](int64_t unit) {
    Block<T> block(p, unit);
    Buffer<float> states(block.size), sums(CHANNELS);
    for (int64_t s = 0; s < p.S; ++s) {
      std::fill_n(static_cast<float*>(states), block.size, 0.0f);
      const int64_t place = (s * p.D + block.first) * p.M;
      for (int64_t c = 0; initial && c < block.count; ++c)
        for (int64_t m = 0; m < p.M; ++m) states[m * CHANNELS + c] = initial[place + c * p.M + m];
      for (int64_t t = p.starts[s]; t < p.starts[s + 1]; ++t) {
        block.load_token(t);
        block.advance(t, states, states);
        float* sum = sums;
        for (int64_t c = 0; c < block.count; ++c) sum[c] = p.skip[block.first + c] * block.x[c];
        for (int64_t m = 0; m < p.M; ++m) {
          const float factor = p.out[t * p.M + m];
          const float* state = states + m * CHANNELS;
          for (int64_t c = 0; c < block.count; ++c) sum[c] += factor * state[c];
        }
        store_row(static_cast<T*>(out) + t * p.D + block.first, sum, block.count);
      }
      for (int64_t c = 0; last && c < block.count; ++c)
        for (int64_t m = 0; m < p.M; ++m) last[place + c * p.M + m] = states[m * CHANNELS + c];
    }
  });
}

// The gradients. Those of `in` and `out` are sums over the channels of a block, (blocks, N, M).
struct Gradients {
  const void* y;
  void* x;
  float *steps, *rates, *in, *out, *skip;
};

// Computes the gradients of a block of channels.
template <typename T>
class Backward {
 public:
  Backward(const Scan& p, const Gradients& grads, int64_t unit, int64_t longest)
      : p_(p), grads_(grads), block_(p, unit), place_(unit * p.N * p.M), kept_(divide_up(longest, STEPS) * block_.size),
        states_((STEPS + 1) * block_.size), grad_(block_.size), rate_sums_(block_.size), skip_sums_(CHANNELS),
        y_(CHANNELS), x_grad_(CHANNELS), step_grad_(CHANNELS) {}

  void run() {
    std::fill_n(static_cast<float*>(rate_sums_), block_.size, 0.0f);
    std::fill_n(static_cast<float*>(skip_sums_), CHANNELS, 0.0f);
    std::fill_n(static_cast<float*>(y_), CHANNELS, 0.0f);
    for (int64_t s = 0; s < p_.S; ++s) sequence(p_.starts[s], p_.starts[s + 1]);
    for (int64_t c = 0; c < block_.count; ++c) {
      for (int64_t m = 0; m < p_.M; ++m) grads_.rates[(block_.first + c) * p_.M + m] = rate_sums_[m * CHANNELS + c];
      grads_.skip[block_.first + c] = skip_sums_[c];
    }
  }

 private:
  void sequence(int64_t start, int64_t end) {
    const int64_t size = block_.size, chunks = divide_up(end - start, STEPS);
    std::fill_n(static_cast<float*>(states_), size, 0.0f);
    for (int64_t t = start; t < end; ++t) {
      if ((t - start) % STEPS == 0) std::copy_n(static_cast<float*>(states_), size, kept_ + (t - start) / STEPS * size);
      block_.load_token(t);
      block_.advance(t, states_, states_);
    }
    std::fill_n(static_cast<float*>(grad_), size, 0.0f);
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t from = start + chunk * STEPS, to = std::min(end, from + STEPS);
      std::copy_n(kept_ + chunk * size, size, static_cast<float*>(states_));
      for (int64_t t = from; t < to; ++t) {
        block_.load_token(t);
        block_.advance(t, states_ + (t - from) * size, states_ + (t - from + 1) * size);
      }
      for (int64_t t = to - 1; t >= from; --t) token(t, states_ + (t - from) * size, states_ + (t - from + 1) * size);
    }
  }

  // Adds the gradients of token t. `grad_` is that of the states after it, and becomes that of the states before it.
  void token(int64_t t, const float* before, const float* after) {
    block_.load_token(t);
    const T* from = static_cast<const T*>(grads_.y) + t * p_.D + block_.first;
    const float *x = block_.x, *step = block_.step;
    float *y = y_, *x_grad = x_grad_, *step_grad = step_grad_;
    for (int64_t c = 0; c < block_.count; ++c) {
      y[c] = load(from + c);
      skip_sums_[c] += y[c] * x[c];
      x_grad[c] = p_.skip[block_.first + c] * y[c];
    }
    std::fill_n(step_grad, CHANNELS, 0.0f);
    for (int64_t m = 0; m < p_.M; ++m) {
      const int64_t place = m * CHANNELS;
      const float in = p_.in[t * p_.M + m], factor = p_.out[t * p_.M + m];
      const float *rate = block_.rates + place, *old = before + place, *now = after + place;
      float *grad = grad_ + place, *rate_sum = rate_sums_ + place;
      for (int64_t c = 0; c < CHANNELS; ++c) grad[c] += factor * y[c];
      grads_.in[place_ + t * p_.M + m] = sum_of(CHANNELS, [&](int64_t c) { return grad[c] * step[c] * x[c]; });
      grads_.out[place_ + t * p_.M + m] = sum_of(CHANNELS, [&](int64_t c) { return y[c] * now[c]; });
      for (int64_t c = 0; c < CHANNELS; ++c) {
        const float kept = exp2_nonpositive(rate[c] * step[c]), decayed = grad[c] * kept * old[c];
        step_grad[c] += decayed * rate[c] * (1.0f / LOG2E) + grad[c] * in * x[c];
        x_grad[c] += grad[c] * in * step[c];
        rate_sum[c] += decayed * step[c];
        grad[c] *= kept;
      }
    }
    std::copy_n(step_grad, block_.count, grads_.steps + t * p_.D + block_.first);
    store_row(static_cast<T*>(grads_.x) + t * p_.D + block_.first, x_grad, block_.count);
  }

  const Scan& p_;
  const Gradients& grads_;
  Block<T> block_;
  const int64_t place_;  // of this block's sums of `in` and `out`
  Buffer<float> kept_;   // states before each chunk of STEPS tokens
  Buffer<float> states_, grad_, rate_sums_, skip_sums_, y_, x_grad_, step_grad_;
};

template <typename T>
void backward(const Scan& p, const Gradients& grads) {
  int64_t longest = 0;
  for (int64_t s = 0; s < p.S; ++s) longest = std::max(longest, p.starts[s + 1] - p.starts[s]);
  parallel_each(divide_up(p.D, CHANNELS), [&](int64_t unit) { Backward<T>(p, grads, unit, longest).run(); });
}

}  // namespace

// Returns the number of blocks of channels, whose gradients of `in` and `out` are computed apart.
SANSGPU_KERNEL int64_t selective_scan_blocks(const Scan* inputs) { return divide_up(inputs->D, CHANNELS); }

// Computes `y` (N, D) and, if `last` is not null, the states (S, D, M) after each sequence. `initial`, the states
// before them, may be null.
SANSGPU_KERNEL void selective_scan(const Scan* inputs, const float* initial, void* y, float* last) {
  (inputs->narrow ? forward<bf16> : forward<float>)(*inputs, initial, y, last);
}

// Computes the gradients of x (N, D), steps (N, D), rates (D, M), skip (D,) and, in parts (blocks, N, M) whose sum is
// meant, of in and out. The sequences must have begun with states of zeros.
SANSGPU_KERNEL void selective_scan_gradient(const Scan* inputs, const void* y_grad, void* x_grad, float* steps_grad,
                                            float* rates_grad, float* in_parts, float* out_parts, float* skip_grad) {
  const Gradients grads{y_grad, x_grad, steps_grad, rates_grad, in_parts, out_parts, skip_grad};
  (inputs->narrow ? backward<bf16> : backward<float>)(*inputs, grads);
}

}  // namespace sansgpu
