// Tensors of fp32 or bf16 values, which element-wise kernels read and write as fp32.
#pragma once

#include "tiles.h"

namespace sansgpu {

// An input tensor.
struct Input {
  const void* data;  // null if the input is missing
  bool narrow;       // bf16
  Input(const void* data, int64_t narrow) : data(data), narrow(narrow != 0) {}

  // Returns `count` fp32 values from `start` on: in the tensor if it is fp32, or else converted in `scratch`.
  const float* read(int64_t start, int64_t count, float* scratch) const {
    if (!narrow) return static_cast<const float*>(data) + start;
    const bf16* from = static_cast<const bf16*>(data) + start;
    for (int64_t i = 0; i < count; ++i) scratch[i] = load(from + i);
    return scratch;
  }
};

// An output tensor. A kernel computes values in `place` and then calls `write` for them.
struct Output {
  void* data;
  bool narrow;
  Output(void* data, int64_t narrow) : data(data), narrow(narrow != 0) {}

  // Returns where to compute the values from `start` on: in the tensor if it is fp32, or else in `scratch`.
  float* place(int64_t start, float* scratch) const { return narrow ? scratch : static_cast<float*>(data) + start; }

  // Stores `count` values of `scratch` in the tensor if it is bf16.
  void write(int64_t start, int64_t count, const float* scratch) const {
    if (narrow) store_row(static_cast<bf16*>(data) + start, scratch, count);
  }
};

inline float sigmoid(float x) {
  const float e = exp2_nonpositive(-LOG2E * std::fabs(x)), share = 1.0f / (1.0f + e);
  return x >= 0.0f ? share : e * share;
}

}  // namespace sansgpu
