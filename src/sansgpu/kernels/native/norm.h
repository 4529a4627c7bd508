// Normalizes a row of width D: LayerNorm if `centered`, otherwise RMSNorm.
#pragma once

#include "parallel.h"
#include "tiles.h"

namespace sansgpu {

struct NormOptions {
  float eps;
  bool centered;  // subtract the mean, as LayerNorm does
  NormOptions(double eps, int64_t centered) : eps(static_cast<float>(eps)), centered(centered != 0) {}
};

struct NormStatistics {
  float mean, scale;
};

inline NormStatistics norm_statistics(const float* x, int64_t D, NormOptions options) {
  const float mean = options.centered ? sum_of(D, [=](int64_t i) { return x[i]; }) / D : 0.0f;
  const float squares = sum_of(D, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, 1.0f / std::sqrt(squares / D + options.eps)};
}

// Writes the normalized row; `bias` may be null.
inline void normalize(const float* x, const float* weight, const float* bias, int64_t D, NormOptions options,
                      float* __restrict to) {
  const NormStatistics s = norm_statistics(x, D, options);
  if (bias != nullptr)
    for (int64_t i = 0; i < D; ++i) to[i] = (x[i] - s.mean) * s.scale * weight[i] + bias[i];
  else
    for (int64_t i = 0; i < D; ++i) to[i] = (x[i] - s.mean) * s.scale * weight[i];
}

// Writes the gradient of x, plus `base` if it is not null, given the gradient g of the normalized row. Adds to
// `weight_grad` and `bias_grad` if they are not null.
inline void normalize_gradient(const float* g, const float* x, const float* weight, const float* base, int64_t D,
                               NormOptions options, float* __restrict to, float* __restrict weight_grad,
                               float* __restrict bias_grad) {
  const NormStatistics s = norm_statistics(x, D, options);
  const float along = sum_of(D, [=](int64_t i) { return g[i] * weight[i] * (x[i] - s.mean); });
  const float slope = along * s.scale * s.scale / D;
  const float shift = options.centered ? sum_of(D, [=](int64_t i) { return g[i] * weight[i]; }) / D : 0.0f;
  const auto gradient = [=](int64_t i) { return s.scale * (g[i] * weight[i] - shift - (x[i] - s.mean) * slope); };
  if (base != nullptr)
    for (int64_t i = 0; i < D; ++i) to[i] = base[i] + gradient(i);
  else
    for (int64_t i = 0; i < D; ++i) to[i] = gradient(i);
  if (weight_grad != nullptr)
    for (int64_t i = 0; i < D; ++i) weight_grad[i] += g[i] * (x[i] - s.mean) * s.scale;
  if (bias_grad != nullptr)
    for (int64_t i = 0; i < D; ++i) bias_grad[i] += g[i];
}

// Partial sums of weight gradients, one row per unit of work, so that totals do not depend on the number of threads.
class UnitSums {
 public:
  UnitSums(int64_t units, int64_t width, bool wanted)
      : units_(units), width_(width), sums_(wanted ? units * width : 0), wanted_(wanted) {}

  // Returns the zeroed sums of a unit, or null if no gradient is requested.
  float* of(int64_t unit) const {
    if (!wanted_) return nullptr;
    std::fill_n(sums_ + unit * width_, width_, 0.0f);
    return sums_ + unit * width_;
  }

  // Adds up the units in order.
  void total(float* to) const {
    if (!wanted_) return;
    parallel_each(divide_up(width_, COLUMNS), [&](int64_t block) {
      const int64_t first = block * COLUMNS, count = std::min(COLUMNS, width_ - first);
      float sum[COLUMNS] = {};
      for (int64_t unit = 0; unit < units_; ++unit)
        for (int64_t i = 0; i < count; ++i) sum[i] += sums_[unit * width_ + first + i];
      std::copy_n(sum, count, to + first);
    });
  }

 private:
  static constexpr int64_t COLUMNS = 256;
  const int64_t units_, width_;
  const Buffer<float> sums_;
  const bool wanted_;
};

}  // namespace sansgpu
