// Linear layers with a quantized weight for kernels/frozen_linear.py, and dequantization for
// kernels/block_quantization.py.

#include "quantized_rows.h"

namespace sansgpu {
namespace {

// Calls run(W, P()) with a quantized matrix W (O, I), whose values are rounded to bf16 for BF16, and the type P that
// operands are packed as.
template <typename Run>
void with_rows(int64_t precision, int64_t format, const void* weight, int64_t I, const Run& run) {
  if (precision == BF16) return run(QuantizedRows<bf16>(format, weight, I), bf16());
  const QuantizedRows<float> rows(format, weight, I);
  precision == INT16 ? run(rows, bfp16()) : run(rows, float());
}

}  // namespace

// Computes y (N, O) = x (N, I) W^T + bias (O,). `bias` may be null.
SANSGPU_KERNEL void quantized_forward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
                                      const void* weight, const void* x, const float* bias, void* y) {
  with_rows(precision, format, weight, I, [&]<typename T, typename P>(const QuantizedRows<T>& w, P) {
    multiply_rows<P>(N, O, I, static_cast<const T*>(x), w.turned(), StoreWithBias<T>{static_cast<T*>(y), O, bias});
  });
}

// Computes x_grad (N, I) = grad (N, O) W.
SANSGPU_KERNEL void quantized_backward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
                                       const void* weight, const void* grad, void* x_grad) {
  with_rows(precision, format, weight, I, [&]<typename T, typename P>(const QuantizedRows<T>& w, P) {
    multiply_rows<P>(N, I, O, static_cast<const T*>(grad), w, StoreWithBias<T>{static_cast<T*>(x_grad), I, nullptr});
  });
}

SANSGPU_KERNEL void dequantize_rows(int64_t precision, int64_t format, int64_t O, int64_t I, const void* weight,
                                    void* values) {
  with_rows(precision, format, weight, I, [&]<typename T, typename P>(const QuantizedRows<T>& w, P) {
    parallel_each(O, [&](int64_t row) { w.decode(w.at + row * w.ld, w.ld, 1, 0, I, static_cast<T*>(values) + row * I, I); });
  });
}

}  // namespace sansgpu
