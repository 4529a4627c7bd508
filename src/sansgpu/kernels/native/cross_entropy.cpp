// Computes losses and overwrites logits with their gradients; kernels/cross_entropy.py has the reference.
//
// N tokens, V vocabulary. A row of logits and its exponentials stay in L2 cache between maximum, sum and gradient.

#include "parallel.h"
#include "tiles.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 14;  // logits per unit of work, or one row

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

// Runs row_loss on the rows of logits (N, V); `losses` is (N,), `targets` lie in [0, V).
template <typename T>
void rows_loss(T* logits, const int64_t* targets, float* losses, int64_t N, int64_t V, const Loss& loss, bool gradient) {
  const int64_t rows = std::max<int64_t>(1, GRAIN / V), units = divide_up(N, rows);
  parallel_units(units, [&](Units& own) {
    Buffer<float> powers(V);
    for (int64_t unit; own.draw(unit);)
      for (int64_t i = unit * rows; i < std::min(N, (unit + 1) * rows); ++i)
        losses[i] = loss.softcap > 0 ? row_loss<true>(logits + i * V, powers, V, targets[i], loss, gradient)
                                     : row_loss<false>(logits + i * V, powers, V, targets[i], loss, gradient);
  });
}

}  // namespace

SANSGPU_KERNEL void cross_entropy(int64_t narrow, void* logits, const int64_t* targets, float* losses, int64_t N,
                                  int64_t V, double smoothing, double z_loss, double softcap, int64_t gradient) {
  const Loss loss{static_cast<float>(smoothing), static_cast<float>(z_loss), static_cast<float>(softcap)};
  narrow ? rows_loss(static_cast<bf16*>(logits), targets, losses, N, V, loss, gradient)
         : rows_loss(static_cast<float*>(logits), targets, losses, N, V, loss, gradient);
}

}  // namespace sansgpu
