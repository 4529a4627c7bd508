// The matmuls of product.h for fp32 and bf16, with the fastest instructions.

#include "product.h"

#include "product_vectors.h"
#if defined(__AMX_BF16__) || defined(SANSGPU_EMULATE_AMX)
#define SANSGPU_AMX
#include "product_tiles.h"
#endif

namespace sansgpu {

template <>
void product(int64_t M, int64_t N, int64_t K, const float* A, int64_t lda, const float* B, int64_t ldb, float* C,
             int64_t ldc, bool add) {
  multiply_words(M, N, K, A, lda, B, ldb, C, ldc, add);
}

template <>
void product(int64_t M, int64_t N, int64_t K, const bf16* A, int64_t lda, const bf16* B, int64_t ldb, float* C,
             int64_t ldc, bool add) {
  const auto pairs = reinterpret_cast<const uint32_t*>(B);
#ifdef SANSGPU_AMX
  if (may_use_tiles()) return multiply_by_tiles(M, N, K, A, lda, pairs, ldb, C, ldc, add);
#endif
  if constexpr (MULTIPLIES_PAIRS)
    multiply_words(M, N, K / 2, A, lda, pairs, ldb, C, ldc, add);
  else
    multiply_widened(M, N, K, A, lda, pairs, ldb, C, ldc, add);
}

void end_products() {
#ifdef SANSGPU_AMX
  release_tiles();
#endif
}

// Computes the same matmul `repeats` times, for tests and benchmarks.
SANSGPU_KERNEL void product(int64_t narrow, int64_t repeats, int64_t M, int64_t N, int64_t K, const void* A,
                            int64_t lda, const void* B, int64_t ldb, float* C, int64_t ldc, int64_t add) {
  for (int64_t repeat = 0; repeat < repeats; ++repeat)
    narrow ? product(M, N, K, static_cast<const bf16*>(A), lda, static_cast<const bf16*>(B), ldb, C, ldc, add)
           : product(M, N, K, static_cast<const float*>(A), lda, static_cast<const float*>(B), ldb, C, ldc, add);
  end_products();
}

}  // namespace sansgpu
