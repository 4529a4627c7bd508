// Linear layers with a quantized weight for kernels/frozen_linear.py, and dequantization for
// kernels/block_quantization.py.

#include "quantized_rows.h"

namespace sansgpu {
namespace {

// Calls run(W, T(), P()) with a quantized matrix W (O, I), the dtype T of the other operand, and the type P that operands
// are packed as.
template <typename Run>
void with_rows(int64_t precision, int64_t format, const void* weight, int64_t I, const Run& run) {
  with_precision(precision, [&]<typename T, typename P>(T other, P packed) {
    run(QuantizedRows<Dequantized<T, P>>(format, weight, I), other, packed);
  });
}

}  // namespace

// Computes y (N, O) = x (N, I) W^T + bias (O,). `bias` may be null.
SANSGPU_KERNEL void quantized_forward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
                                      const void* weight, const void* x, const float* bias, void* y) {
  with_rows(precision, format, weight, I, [&]<typename T, typename P>(const auto& w, T, P) {
    multiply_rows<P>(N, O, I, static_cast<const T*>(x), w.turned(), StoreWithBias<T>{static_cast<T*>(y), O, bias});
  });
}

// Computes x_grad (N, I) = grad (N, O) W.
SANSGPU_KERNEL void quantized_backward(int64_t precision, int64_t format, int64_t N, int64_t I, int64_t O,
                                       const void* weight, const void* grad, void* x_grad) {
  with_rows(precision, format, weight, I, [&]<typename T, typename P>(const auto& w, T, P) {
    multiply_rows<P>(N, I, O, static_cast<const T*>(grad), w, StoreWithBias<T>{static_cast<T*>(x_grad), I, nullptr});
  });
}

SANSGPU_KERNEL void dequantize_rows(int64_t narrow, int64_t format, int64_t O, int64_t I, const void* weight,
                                    void* values) {
  const auto decode = [&]<typename T>(const QuantizedRows<T>& w) {
    parallel_each(O, [&](int64_t row) { w.decode(w.at + row * w.ld, w.ld, 1, 0, I, static_cast<T*>(values) + row * I, I); });
  };
  narrow ? decode(QuantizedRows<bf16>(format, weight, I)) : decode(QuantizedRows<float>(format, weight, I));
}

}  // namespace sansgpu
