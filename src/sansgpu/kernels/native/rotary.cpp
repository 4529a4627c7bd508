// Rotary position embedding of queries and keys, optionally after RMSNorm of each head (QK-norm); kernels/rotary.py has
// the reference.
//
// N tokens, H heads, d head dim (even). Tensors are (N, H, d); q, k and their gradients may have gaps between tokens.
// cos and sin are (periods, d), and token i uses row i % periods, so that all rows of a batch can share their
// positions.

#include "norm.h"
#include "parallel.h"
#include "rotary.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 14;  // values per unit of work

// Either the queries or the keys.
struct Heads {
  const void* x;
  void* to;  // the result, or the gradient of x
  const void* grad;
  const float* weight;  // weight of RMSNorm; null without QK-norm
  int64_t H, time;  // number of heads, and stride from a token to the next in x and its gradient
};

struct Rotation {
  const float *cos, *sin;
  int64_t periods, N, d;
  NormOptions options;
  bool narrow;

  void forward(const Heads& heads, int64_t token, float* scratch) const {
    const int64_t width = heads.H * d, row = token % periods * d;
    const float* x = Input(heads.x, narrow).read(token * heads.time, width, scratch);
    const Output to(heads.to, narrow);
    float *out = to.place(token * width, scratch + width), *normed = scratch + 2 * width;
    for (int64_t head = 0; head < width; head += d) {
      if (heads.weight != nullptr) normalize(x + head, heads.weight, nullptr, d, options, normed);
      rotate(heads.weight != nullptr ? normed : x + head, cos + row, sin + row, d, false, out + head);
    }
    to.write(token * width, width, out);
  }

  void backward(const Heads& heads, int64_t token, float* scratch, float* weight_sum) const {
    const int64_t width = heads.H * d, row = token % periods * d;
    const float* g = Input(heads.grad, narrow).read(token * width, width, scratch);
    const Output to(heads.to, narrow);
    float *out = to.place(token * heads.time, scratch + width), *normed_grad = scratch + 2 * width;
    if (heads.weight == nullptr) {
      for (int64_t head = 0; head < width; head += d) rotate(g + head, cos + row, sin + row, d, true, out + head);
    } else {
      const float* x = Input(heads.x, narrow).read(token * heads.time, width, scratch + 2 * width + d);
      for (int64_t head = 0; head < width; head += d) {
        rotate(g + head, cos + row, sin + row, d, true, normed_grad);
        normalize_gradient(normed_grad, x + head, heads.weight, nullptr, d, options, out + head, weight_sum, nullptr);
      }
    }
    to.write(token * heads.time, width, out);
  }

  // Calls work(unit, first token, end token, scratch) for each unit of tokens.
  template <typename F>
  void each(int64_t H, const F& work) const {
    const int64_t rows = tokens_of_unit(H);
    parallel_units(divide_up(N, rows), [&](Units& units) {
      Buffer<float> scratch((3 * H + 1) * d);
      for (int64_t unit; units.draw(unit);) work(unit, unit * rows, std::min(N, (unit + 1) * rows), scratch);
    });
  }

  int64_t tokens_of_unit(int64_t H) const { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, H * d)); }
};

}  // namespace

// Rotates queries and keys. q_weight and k_weight are null without QK-norm.
SANSGPU_KERNEL void rotary(int64_t narrow, const void* q, const void* k, const float* q_weight, const float* k_weight,
                           const float* cos, const float* sin, void* q_out, void* k_out, int64_t N, int64_t periods,
                           int64_t q_heads, int64_t k_heads, int64_t d, int64_t q_time, int64_t k_time, double eps) {
  const Rotation rotation{cos, sin, periods, N, d, NormOptions(eps, false), narrow != 0};
  const Heads queries{q, q_out, nullptr, q_weight, q_heads, q_time};
  const Heads keys{k, k_out, nullptr, k_weight, k_heads, k_time};
  rotation.each(q_heads + k_heads, [=](int64_t, int64_t token, int64_t end, float* scratch) {
    for (; token < end; ++token) {
      rotation.forward(queries, token, scratch);
      rotation.forward(keys, token, scratch);
    }
  });
}

// Computes the gradients of q, k and, unless null, the weights.
SANSGPU_KERNEL void rotary_gradient(int64_t narrow, const void* q_grad, const void* k_grad, const void* q, const void* k,
                                    const float* q_weight, const float* k_weight, const float* cos, const float* sin,
                                    void* to_q, void* to_k, float* q_weight_grad, float* k_weight_grad, int64_t N,
                                    int64_t periods, int64_t q_heads, int64_t k_heads, int64_t d, int64_t q_time,
                                    int64_t k_time, double eps) {
  const Rotation rotation{cos, sin, periods, N, d, NormOptions(eps, false), narrow != 0};
  const Heads queries{q, to_q, q_grad, q_weight, q_heads, q_time};
  const Heads keys{k, to_k, k_grad, k_weight, k_heads, k_time};
  const int64_t units = divide_up(N, rotation.tokens_of_unit(q_heads + k_heads));
  const UnitSums q_sums(units, d, q_weight_grad != nullptr), k_sums(units, d, k_weight_grad != nullptr);
  rotation.each(q_heads + k_heads, [&](int64_t unit, int64_t token, int64_t end, float* scratch) {
    float *q_sum = q_sums.of(unit), *k_sum = k_sums.of(unit);
    for (; token < end; ++token) {
      rotation.backward(queries, token, scratch, q_sum);
      rotation.backward(keys, token, scratch, k_sum);
    }
  });
  q_sums.total(q_weight_grad);
  k_sums.total(k_weight_grad);
}

}  // namespace sansgpu
