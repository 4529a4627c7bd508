// Soft caps of scores and logits (arXiv 2408.00118).
#pragma once

#include "tiles.h"

namespace sansgpu {

// Computes tanh(x) with a relative error of 3e-7, without branches, so that loops are vectorized. Small values, where
// exponentials would cancel, use Cephes' polynomial.
inline float hyperbolic_tangent(float x) {
  const float z = std::fabs(x), e = exp2_nonpositive(-2.0f * LOG2E * z), s = z * z;
  float y = -5.70498872745e-3f;
  y = y * s + 2.06390887954e-2f;
  y = y * s - 5.37397155531e-2f;
  y = y * s + 1.33314422036e-1f;
  y = y * s - 3.33332819422e-1f;
  return std::copysign(z < 0.625f ? z + z * s * y : (1.0f - e) / (1.0f + e), x);
}

// Replaces x by bound * tanh(x / bound).
struct SoftCap {
  float bound, inverse;
  explicit SoftCap(float bound) : bound(bound), inverse(1.0f / bound) {}
  float value(float x) const { return bound * hyperbolic_tangent(x * inverse); }

  // Returns the derivative of `value` at the point where it is y.
  float slope(float y) const { return 1.0f - (y * inverse) * (y * inverse); }
};

}  // namespace sansgpu
