// The kernels of kernels/feed_forward.py: matmuls, an activation of their results, and matmuls of the activation, each
// on all threads.

#include "../native.h"

namespace sansgpu {
namespace {

bool is_narrow(int64_t precision) { return precision == BF16 || precision == INT8_OF_BF16; }

}  // namespace

SANSGPU_KERNEL void feed_forward(int64_t precision, const Matmul* before, int64_t count_before, const Matmul* after,
                                 int64_t count_after, int64_t kind, const void* x, const void* y, void* activated,
                                 int64_t N) {
  matmuls(precision, before, count_before);
  activation(kind, is_narrow(precision), x, y, activated, N, N, N);
  matmuls(precision, after, count_after);
}

SANSGPU_KERNEL void feed_forward_gradient(int64_t precision, const Matmul* before, int64_t count_before,
                                          const Matmul* after, int64_t count_after, int64_t kind, const void* grad,
                                          const void* x, const void* y, void* x_grad, void* y_grad, void* activated,
                                          int64_t N) {
  matmuls(precision, before, count_before);
  activation_gradient(kind, is_narrow(precision), grad, x, y, x_grad, y_grad, activated, N, N, N);
  matmuls(precision, after, count_after);
}

}  // namespace sansgpu
