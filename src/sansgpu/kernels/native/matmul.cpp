// Matmuls for kernels/matmul.py.

#include "matmul.h"

namespace sansgpu {
namespace {

template <typename T>
Operand<T> operand(const void* at, int64_t ld, int64_t transposed) {
  return {static_cast<const T*>(at), ld, transposed != 0};
}

// Computes matmuls in parallel, but those that add to the same `total` one after another.
template <typename T, typename P>
void multiply(const Matmul* each, const Matmul* end) {
  while (each < end) {
    std::vector<Multiplication<T, StoreWithBias<T>, Operand<T>, P>> together;
    const Matmul* first = each;
    const auto added = [&](const Matmul& one) { return one.total != nullptr && one.total == each->total; };
    for (; each < end && std::none_of(first, each, added); ++each) {
      const auto& [M, N, K, a, lda, a_transposed, b, ldb, b_transposed, bias, out, total, add, row_sums] = *each;
      const Operand<T> left = operand<T>(a, lda, a_transposed), right = operand<T>(b, ldb, b_transposed);
      together.emplace_back(Product<T>{M, N, K, left, right, total, add != 0, row_sums},
                            StoreWithBias<T>{static_cast<T*>(out), N, bias});
    }
    together[0].run_together(together.data(), together.size());
  }
}

}  // namespace

// Computes independent matmuls of the same precision: none may read what another one stores. Matmuls with the same
// `total` are computed one after another.
SANSGPU_KERNEL void matmuls(int64_t precision, const Matmul* list, int64_t count) {
  with_precision(precision, [&]<typename T, typename P>(T, P) { multiply<T, P>(list, list + count); });
}

}  // namespace sansgpu
