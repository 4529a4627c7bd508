// Computes losses and overwrites logits with their gradients; kernels/cross_entropy.py has the reference.
//
// N tokens, V vocabulary. A row of logits and its exponentials stay in L2 cache between maximum, sum and gradient.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tiles.h"

namespace sansgpu {
namespace {

constexpr float LOG2E = 1.4426950408889634f;

struct Loss {
  float smoothing, z_loss, softcap;  // softcap 0 disables it
};

// softcap * tanh(x / softcap), with tanh written in terms of exp so that the loop vectorizes.
inline float capped(float x, float softcap) {
  const float e = exp2_nonpositive(-2.0f * LOG2E / softcap * std::fabs(x));
  return std::copysign(softcap * (1.0f - e) / (1.0f + e), x);
}

// Returns the loss of one row. `powers` (V,) is scratch space for the exponentials.
template <bool CAPPED, typename T>
float row_loss(T* logits, float* powers, int64_t V, int64_t target, const Loss& loss, bool gradient) {
  const auto logit = [&](int64_t j) { return CAPPED ? capped(load(logits + j), loss.softcap) : load(logits + j); };
  const float most = max_of(V, logit);
  const float sum = sum_of(V, [&](int64_t j) { return powers[j] = exp2_nonpositive((logit(j) - most) * LOG2E); });
  const float total = loss.smoothing != 0 ? sum_of(V, logit) : 0.0f;
  const float lse = most + std::log(sum), uniform = loss.smoothing / V, of_target = logit(target);
  if (gradient) {
    const float share = (1.0f + 2.0f * loss.z_loss * lse) / sum, target_share = 1.0f - loss.smoothing;
    const float slope = CAPPED ? 1.0f - (of_target / loss.softcap) * (of_target / loss.softcap) : 1.0f;
    const float at_target = (share * powers[target] - uniform - target_share) * slope;
    for (int64_t j = 0; j < V; ++j) {
      const float z = CAPPED ? logit(j) / loss.softcap : 0.0f;
      powers[j] = (share * powers[j] - uniform) * (1.0f - z * z);
    }
    store_row(logits, powers, V);
    store(logits + target, at_target);
  }
  return lse - (1.0f - loss.smoothing) * of_target - uniform * total + loss.z_loss * lse * lse;
}

at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, double smoothing, double z_loss,
                          double softcap, bool gradient) {
  const int64_t N = logits.size(0), V = logits.size(1);
  at::Tensor losses = at::empty({N}, logits.options().dtype(at::kFloat));
  const Loss loss{static_cast<float>(smoothing), static_cast<float>(z_loss), static_cast<float>(softcap)};
  const int64_t* target = targets.data_ptr<int64_t>();
  for (int64_t i = 0; i < N; ++i)
    TORCH_CHECK_INDEX(target[i] >= 0 && target[i] < V, "Target ", target[i], " is out of bounds.");
  float* out = losses.data_ptr<float>();
  const auto run = [&](auto* data) {
    at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
      Buffer<float> powers(V);
      for (int64_t i = begin; i < end; ++i)
        out[i] = softcap > 0 ? row_loss<true>(data + i * V, powers, V, target[i], loss, gradient)
                             : row_loss<false>(data + i * V, powers, V, target[i], loss, gradient);
    });
  };
  logits.scalar_type() == at::kBFloat16 ? run(logits.data_ptr<bf16>()) : run(logits.data_ptr<float>());
  return losses;
}

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) { library.impl("cross_entropy_", &cross_entropy_); }

}  // namespace sansgpu
