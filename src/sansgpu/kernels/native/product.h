// Matmuls of tiles that stay in cache, for each instruction set: AMX, AVX512_BF16, AVX-512, AVX2, NEON and portable.
#pragma once

#include "tiles.h"

namespace sansgpu {

// The largest vector registers of the instruction set.
#if defined(__AVX512F__)
constexpr int64_t VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int64_t VECTOR_BYTES = 32;
#else
constexpr int64_t VECTOR_BYTES = 16;
#endif

// C (M, N) fp32 = A (M, K) B (K, N), or += with `add`. B must be packed by `pack` or `pack_transposed`; K must be even
// for bf16.
template <typename T>
inline void product(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C,
                    int64_t ldc, bool add) {
  constexpr bool WIDE = sizeof(T) == 4;
  for (int64_t i = 0; i < M; ++i) {
    float* to = C + i * ldc;
    if (!add) std::fill_n(to, N, 0.0f);
    for (int64_t k = 0; k < K; k += WIDE ? 1 : 2) {
      const float first = load(A + i * lda + k);
      if constexpr (WIDE) {
        for (int64_t j = 0; j < N; ++j) to[j] += first * B[k * ldb + j];
      } else {
        const float second = load(A + i * lda + k + 1);
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(B) + k / 2 * ldb;
        for (int64_t j = 0; j < N; ++j)
          to[j] += first * widen(static_cast<uint16_t>(pairs[j])) + second * widen(static_cast<uint16_t>(pairs[j] >> 16));
      }
    }
  }
}

}  // namespace sansgpu
