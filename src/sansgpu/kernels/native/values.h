// Access to fp32 or bf16 tensors for element-wise kernels, which compute in fp32.
#pragma once

#include "tiles.h"

namespace sansgpu {

// An input tensor.
struct Input {
  const void* data;  // null if there is no such input
  bool narrow;       // bf16
  Input(const void* data, int64_t narrow) : data(data), narrow(narrow != 0) {}

  // Returns the fp32 values [start, start + count): a pointer into the tensor if it is fp32, otherwise converted values
  // in `scratch`.
  const float* read(int64_t start, int64_t count, float* scratch) const {
    if (!narrow) return static_cast<const float*>(data) + start;
    const bf16* from = static_cast<const bf16*>(data) + start;
    for (int64_t i = 0; i < count; ++i) scratch[i] = load(from + i);
    return scratch;
  }
};

// An output tensor. A kernel computes values in the memory that `place` returns, and then calls `write` for them.
struct Output {
  void* data;
  bool narrow;
  Output(void* data, int64_t narrow) : data(data), narrow(narrow != 0) {}

  // Returns where to compute the values starting at `start`: in the tensor if it is fp32, otherwise in `scratch`.
  float* place(int64_t start, float* scratch) const { return narrow ? scratch : static_cast<float*>(data) + start; }

  // If the tensor is bf16, converts `count` values in `scratch` and stores them in it.
  void write(int64_t start, int64_t count, const float* scratch) const {
    if (narrow) store_row(static_cast<bf16*>(data) + start, scratch, count);
  }
};

inline float sigmoid(float x) {
  const float e = exp2_nonpositive(-LOG2E * std::fabs(x)), share = 1.0f / (1.0f + e);
  return x >= 0.0f ? share : e * share;
}

}  // namespace sansgpu
