// The matmuls of product.h for block floating point.

#include "product_mantissas.h"

namespace sansgpu {

template <>
void product(int64_t M, int64_t N, int64_t K, const bfp16* A, int64_t lda, const bfp16* B, int64_t ldb, float* C,
             int64_t ldc, bool add) {
  multiply_block_floats(M, N, K, A, lda, B, ldb, C, ldc, add);
}

template <>
void product(int64_t M, int64_t N, int64_t K, const bfp8* A, int64_t lda, const bfp8* B, int64_t ldb, float* C,
             int64_t ldc, bool add) {
  multiply_block_floats(M, N, K, A, lda, B, ldb, C, ldc, add);
}

}  // namespace sansgpu
