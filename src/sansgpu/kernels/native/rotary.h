// Rotary position embedding of one head.
#pragma once

#include "tiles.h"

namespace sansgpu {

// Computes out = x cos + rotate_half(x) sin or, with `inverse`, the inverse rotation for the backward pass.
inline void rotate(const float* x, const float* cos, const float* sin, int64_t d, bool inverse, float* __restrict out) {
  const int64_t half = d / 2;
  const float *low_sin = inverse ? sin + half : sin, *high_sin = inverse ? sin : sin + half, sign = inverse ? 1.0f : -1.0f;
  for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] + sign * x[i + half] * low_sin[i];
  for (int64_t i = 0; i < half; ++i) out[i + half] = x[i + half] * cos[i + half] - sign * x[i] * high_sin[i];
}

}  // namespace sansgpu
