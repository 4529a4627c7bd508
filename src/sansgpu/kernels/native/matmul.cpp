// Matmuls for kernels/matmul.py.

#include "matmul.h"

namespace sansgpu {
namespace {

template <typename T>
struct StoreWithBias {
  T* to;
  int64_t ld;
  const float* bias;  // may be null

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    if (bias != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] += bias[column + j];
    store_row(to + row * ld + column, sums, count);
  }
};

struct StayInTotal {
  void operator()(int64_t, int64_t, int64_t, float*) const {}
};

template <typename T>
void run(const Product<T>& product, T* out, const float* bias) {
  if (out == nullptr)
    Multiplication(product, StayInTotal()).run();
  else
    Multiplication(product, StoreWithBias<T>{out, product.N, bias}).run();
}

template <typename T>
Operand<T> operand(const void* at, int64_t ld, int64_t transposed) {
  return {static_cast<const T*>(at), ld, transposed != 0};
}

}  // namespace

// Stores C (M, N) = A (M, K) B (K, N) + bias (N,) in `out`, in the dtype of A and B. If `total` is not null, C is stored
// there in fp32, or added with `add`, without a bias, and then `out`, which may be null, gets its rounded values. `bias`
// and `row_sums` may be null; see Product.
SANSGPU_KERNEL void matmul(int64_t narrow, int64_t M, int64_t N, int64_t K, const void* a, int64_t lda,
                           int64_t a_transposed, const void* b, int64_t ldb, int64_t b_transposed, const float* bias,
                           void* out, float* total, int64_t add, float* row_sums) {
  const auto multiply = [&]<typename T>(T* to) {
    const Operand<T> left = operand<T>(a, lda, a_transposed), right = operand<T>(b, ldb, b_transposed);
    run<T>({M, N, K, left, right, total, add != 0, row_sums}, to, bias);
  };
  narrow ? multiply(static_cast<bf16*>(out)) : multiply(static_cast<float*>(out));
}

}  // namespace sansgpu
