// Causal convolution of each channel over a few tokens; kernels/recurrent/short_convolution.py has the reference.
//
// N tokens of S sequences, D channels, W weights per channel. A unit of work is a block of channels, which it follows
// through all tokens, so that sums over tokens have a fixed order.

#include "parallel.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t CHANNELS = 64;  // per block

// The channels [first, first + count) of an input, with the last W rows of a sequence in fp32.
template <typename T>
class Block {
 public:
  Block(const Convolution& p, int64_t unit)
      : first(unit * CHANNELS), count(std::min(CHANNELS, p.D - first)), weights(p.W * CHANNELS), bias(CHANNELS),
        before(CHANNELS), p_(p), rows_(p.W * CHANNELS) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t w = 0; w < p.W; ++w) weights[w * CHANNELS + c] = p.weight[(first + c) * p.W + w];
      bias[c] = p.bias ? p.bias[first + c] : 0.0f;
    }
  }

  // Returns the row of token t, which may be one of the last W.
  float* row(int64_t t) const { return rows_ + t % p_.W * CHANNELS; }

  // Loads token t of a sequence that starts at `start`, and computes its sum before the activation.
  void advance(int64_t start, int64_t t) {
    const T* from = static_cast<const T*>(p_.x) + t * p_.x_time + first;
    for (int64_t c = 0; c < count; ++c) row(t)[c] = load(from + c);
    std::copy_n(static_cast<float*>(bias), count, static_cast<float*>(before));
    for (int64_t back = 0; back < std::min(p_.W, t - start + 1); ++back) {
      const float *weight = weights + (p_.W - 1 - back) * CHANNELS, *values = row(t - back);
      float* sum = before;
      for (int64_t c = 0; c < count; ++c) sum[c] += weight[c] * values[c];
    }
  }

  const int64_t first, count;
  Buffer<float> weights, bias;  // (W, CHANNELS) and (CHANNELS,)
  Buffer<float> before;         // (CHANNELS,): the sum before the activation

 private:
  const Convolution& p_;
  Buffer<float> rows_;
};

template <typename T>
void forward(const Convolution& p, void* out) {
  parallel_each(divide_up(p.D, CHANNELS), [&](int64_t unit) {
    Block<T> block(p, unit);
    float* sums = block.before;
    for (int64_t s = 0; s < p.S; ++s)
      for (int64_t t = p.starts[s]; t < p.starts[s + 1]; ++t) {
        block.advance(p.starts[s], t);
        if (p.silu)
          for (int64_t c = 0; c < block.count; ++c) sums[c] *= sigmoid(sums[c]);
        store_row(static_cast<T*>(out) + t * p.D + block.first, sums, block.count);
      }
  });
}

template <typename T>
void backward(const Convolution& p, const void* grad_out, void* x_grad, float* weight_grad, float* bias_grad) {
  parallel_each(divide_up(p.D, CHANNELS), [&](int64_t unit) {
    Block<T> block(p, unit);
    const int64_t first = block.first, count = block.count;
    Buffer<float> grads(p.W * CHANNELS), weight_sums(p.W * CHANNELS), bias_sums(CHANNELS), grad(CHANNELS);
    std::fill_n(static_cast<float*>(weight_sums), p.W * CHANNELS, 0.0f);
    std::fill_n(static_cast<float*>(bias_sums), CHANNELS, 0.0f);
    const auto finish = [&](int64_t t) {
      store_row(static_cast<T*>(x_grad) + t * p.D + first, grads + t % p.W * CHANNELS, count);
    };
    for (int64_t s = 0; s < p.S; ++s) {
      const int64_t start = p.starts[s], end = p.starts[s + 1];
      for (int64_t t = start; t < end; ++t) {
        block.advance(start, t);
        const T* from = static_cast<const T*>(grad_out) + t * p.D + first;
        const float* sums = block.before;
        for (int64_t c = 0; c < count; ++c) {
          const float share = sigmoid(sums[c]);
          grad[c] = load(from + c) * (p.silu ? share * (1.0f + sums[c] * (1.0f - share)) : 1.0f);
          bias_sums[c] += grad[c];
        }
        std::fill_n(grads + t % p.W * CHANNELS, count, 0.0f);
        for (int64_t back = 0; back < std::min(p.W, t - start + 1); ++back) {
          const int64_t place = (p.W - 1 - back) * CHANNELS;
          const float *weight = block.weights + place, *values = block.row(t - back), *own = grad;
          float *sum = weight_sums + place, *to = grads + (t - back) % p.W * CHANNELS;
          for (int64_t c = 0; c < count; ++c) {
            sum[c] += own[c] * values[c];
            to[c] += own[c] * weight[c];
          }
        }
        if (t - start >= p.W - 1) finish(t - p.W + 1);
      }
      for (int64_t t = std::max(start, end - p.W + 1); t < end; ++t) finish(t);
    }
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t w = 0; w < p.W; ++w) weight_grad[(first + c) * p.W + w] = weight_sums[w * CHANNELS + c];
      if (bias_grad) bias_grad[first + c] = bias_sums[c];
    }
  });
}

}  // namespace

// Computes `out` (N, D).
SANSGPU_KERNEL void short_convolution(const Convolution* inputs, void* out) {
  (inputs->narrow ? forward<bf16> : forward<float>)(*inputs, out);
}

// Computes the gradients of x (N, D), the weight (D, W) and, if `bias_grad` is not null, the bias (D,).
SANSGPU_KERNEL void short_convolution_gradient(const Convolution* inputs, const void* grad_out, void* x_grad,
                                               float* weight_grad, float* bias_grad) {
  (inputs->narrow ? backward<bf16> : backward<float>)(*inputs, grad_out, x_grad, weight_grad, bias_grad);
}

}  // namespace sansgpu
