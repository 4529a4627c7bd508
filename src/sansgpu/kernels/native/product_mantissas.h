// Matmuls of block floating point operands (block_floats.h), whose 32-bit sums stay in vector registers.
//
// Operands are read as 32-bit words: for each block its scale, followed by pairs of mantissas. The integer sums are
// exact, so the result is the same with every instruction set.
#pragma once

#include "block_floats.h"
#include "product_vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sansgpu {

constexpr int64_t BLOCK_WORDS = 1 + BLOCK_TERMS / 2;  // a whole block has a scale and pairs of mantissas

// Adds the products of one pair of A and a vector of pairs of B to `sums`.
inline Ints add_pairs(Ints sums, int32_t a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, _mm512_set1_epi32(a), (__m512i)b);
#elif defined(__AVX512F__)
  return sums + (Ints)_mm512_madd_epi16(_mm512_set1_epi32(a), (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, _mm256_set1_epi32(a), (__m256i)b);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16(_mm256_set1_epi32(a), (__m256i)b);
#elif defined(__SSE2__)
  return sums + (Ints)_mm_madd_epi16(_mm_set1_epi32(a), (__m128i)b);
#else
  return sums + static_cast<int16_t>(a) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Multiplies `blocks` times ROWS rows of A by VECTORS vectors of columns of B. In the K dimension, covers one block of
// mantissas with `words` words, including its scale. Stores the result in C or, with `add`, adds it. lda and ldb are in
// words.
template <int64_t ROWS, int64_t VECTORS>
[[gnu::flatten]] void multiply_mantissas(int64_t blocks, int64_t words, const int32_t* A, int64_t lda, const int32_t* B,
                                         int64_t ldb, float* C, int64_t ldc, bool add) {
  for (; blocks > 0; --blocks, A += ROWS * lda, C += ROWS * ldc) {
    Ints sums[ROWS][VECTORS] = {};
    const int32_t *a = A + 1, *b = B + ldb;
#pragma GCC unroll 1  // GCC would keep some of the sums in memory
    for (int64_t k = 1; k < words; ++k, ++a, b += ldb) {
      Ints row[VECTORS];
      unrolled<VECTORS>([&](auto j) { row[j] = load_as<Ints>(b + j * WIDTH); });
      unrolled<ROWS>([&](auto i) {
        const int32_t pair = a[i * lda];
        unrolled<VECTORS>([&](auto j) { sums[i][j] = add_pairs(sums[i][j], pair, row[j]); });
      });
    }
    unrolled<ROWS>([&](auto i) {
      const float scale = load_as<float>(A + i * lda);
      unrolled<VECTORS>([&](auto j) {
        float* to = C + i * ldc + j * WIDTH;
        // Scales are powers of two, so multiplying by them is exact. An element is rounded only when its sum is
        // converted to fp32 and when it is added to C.
        Floats product = __builtin_convertvector(sums[i][j], Floats) * (scale * load_as<Floats>(B + j * WIDTH));
        if (add) product += load_as<Floats>(to);
        std::memcpy(to, &product, VECTOR_BYTES);
      });
    });
  }
}

template <int64_t ROWS, int64_t VECTORS>
struct BlockFunction<int32_t, int32_t, ROWS, VECTORS> {
  static constexpr auto value = multiply_mantissas<ROWS, VECTORS>;
};

// The matmul of product.h for block floating point operands. K, lda and ldb are in words.
inline void multiply_block_floats(int64_t M, int64_t N, int64_t K, const int32_t* A, int64_t lda, const int32_t* B,
                                  int64_t ldb, float* C, int64_t ldc, bool add) {
  for (int64_t k = 0; k < K; k += BLOCK_WORDS, A += BLOCK_WORDS, B += BLOCK_WORDS * ldb)
    each_panel(N, [&](int64_t start, int64_t columns, int64_t width) {
      multiply_columns(M, columns, width, std::min(BLOCK_WORDS, K - k), A, lda, B + start, ldb, C + start, ldc,
                       add || k > 0);
    });
}

}  // namespace sansgpu
