// Matmuls of tiles that stay in cache, for each instruction set: AMX, AVX512_BF16, AVX-512, AVX2, NEON and portable.
#pragma once

#include "tiles.h"

namespace sansgpu {

// C (M, N) fp32 = A (M, K) B (K, N), or += with `add`. B must be packed by `pack` or `pack_transposed`; K must be even
// for bf16, and above 0. The order of sums depends on the shape alone. Defined for float and bf16.
template <typename T>
void product(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C, int64_t ldc,
             bool add);

// Releases the state that this thread keeps between products (AMX tiles). Call it at the end of a parallel region.
void end_products();

}  // namespace sansgpu
