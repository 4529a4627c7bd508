// Activations of feed-forward layers.
#pragma once

#include "tiles.h"

namespace sansgpu {

// Computes an activation of N values in the dtype of its inputs; y is null but for SwiGLU. kernels/activation.py numbers
// the kinds.
SANSGPU_KERNEL void activation(int64_t kind, int64_t narrow, const void* x, const void* y, void* out, int64_t N);

// Computes the gradients of its inputs and, unless `out` is null, the activation again.
SANSGPU_KERNEL void activation_gradient(int64_t kind, int64_t narrow, const void* grad, const void* x, const void* y,
                                        void* x_grad, void* y_grad, void* out, int64_t N);

}  // namespace sansgpu
