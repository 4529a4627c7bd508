// What is bound by memory: dropout, and what happens to gradients before the next step; each in one pass.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>

#include "tiles.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 15;

// x with a share of its numbers zeroed and the rest scaled up. Linear, so it is its own backward pass.
at::Tensor dropout(const at::Tensor& x, double p, const at::Tensor& seed) {
  at::Tensor out = at::empty_like(x);
  const Dropout drop(p, *seed.data_ptr<int64_t>());
  const auto run = [&](const auto* from, auto* to) {
    at::parallel_for(0, at::divup(x.numel(), GRAIN), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const uint32_t row = drop.row(block, 0);
        const int64_t start = block * GRAIN, count = std::min(GRAIN, x.numel() - start);
        for (int64_t i = 0; i < count; ++i) store(to + start + i, load(from + start + i) * drop.factor(row, i));
      }
    });
  };
  x.scalar_type() == at::kBFloat16 ? run(x.data_ptr<bf16>(), out.data_ptr<bf16>())
                                   : run(x.data_ptr<float>(), out.data_ptr<float>());
  return out;
}

// sum += addend, of fp32 and bf16.
void accumulate_(const at::Tensor& sum, const at::Tensor& addend) {
  float* to = sum.data_ptr<float>();
  const bf16* from = addend.data_ptr<bf16>();
  at::parallel_for(0, sum.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] += load(from + i);
  });
}

// Sum of squares in blocks of fixed size, added in their order: the same bits whatever the threads.
double squared_norm(const at::Tensor& tensor) {
  const int64_t size = tensor.numel(), blocks = at::divup(size, GRAIN);
  Buffer<double> sums(blocks);
  const auto run = [&](const auto* from) {
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const auto* x = from + block * GRAIN;
        sums[block] = sum_of(std::min(GRAIN, size - block * GRAIN), [&](int64_t i) { return load(x + i) * load(x + i); });
      }
    });
  };
  tensor.scalar_type() == at::kBFloat16 ? run(tensor.data_ptr<bf16>()) : run(tensor.data_ptr<float>());
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += sums[block];
  return total;
}

struct AdamW {
  float lr, beta1, beta2, eps, decay, scale, correction1, correction2;
};

template <typename G>
void adamw_range(float* weight, float* first, float* second, const G* grad, bf16* working, int64_t begin, int64_t end,
                 const AdamW& a) {
  for (int64_t i = begin; i < end; ++i) {
    const float g = load(grad + i) * a.scale;
    first[i] += (1.0f - a.beta1) * (g - first[i]);
    second[i] += (1.0f - a.beta2) * (g * g - second[i]);
    weight[i] -= a.lr * (a.decay * weight[i] + first[i] * a.correction1 / (std::sqrt(second[i] * a.correction2) + a.eps));
    if (working) store(working + i, weight[i]);
  }
}

void adamw_(const at::Tensor& weight, const at::Tensor& first, const at::Tensor& second, const at::Tensor& grad,
            const std::optional<at::Tensor>& working, double lr, double beta1, double beta2, double eps, double decay,
            int64_t step, double scale) {
  const AdamW a{static_cast<float>(lr),  static_cast<float>(beta1), static_cast<float>(beta2), static_cast<float>(eps),
                static_cast<float>(decay), static_cast<float>(scale), static_cast<float>(1.0 / (1.0 - std::pow(beta1, step))),
                static_cast<float>(1.0 / (1.0 - std::pow(beta2, step)))};
  float *w = weight.data_ptr<float>(), *m = first.data_ptr<float>(), *v = second.data_ptr<float>();
  bf16* cast = working ? working->data_ptr<bf16>() : nullptr;
  const auto run = [&](const auto* g) {
    at::parallel_for(0, weight.numel(), GRAIN,
                     [&](int64_t begin, int64_t end) { adamw_range(w, m, v, g, cast, begin, end, a); });
  };
  grad.scalar_type() == at::kBFloat16 ? run(grad.data_ptr<bf16>()) : run(grad.data_ptr<float>());
}

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) {
  library.impl("dropout", &dropout);
  library.impl("accumulate_", &accumulate_);
  library.impl("squared_norm", &squared_norm);
  library.impl("adamw_", &adamw_);
}

}  // namespace sansgpu
