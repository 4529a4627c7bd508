// Matmuls of block floating point operands (block_floats.h), whose 32-bit sums stay in vector registers.
//
// Operands are read as 32-bit words: for each block its header, followed by pairs or quadruples of mantissas. The
// integer sums are exact, so they are the same with every instruction set.
#pragma once

#include "block_floats.h"
#include "product_vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace sansgpu {

template <BlockFloat P>
constexpr int64_t BLOCK_WORDS = HEADER_WORDS<P> + BLOCK_TERMS<P> / PER_WORD<P>;

#if defined(__AVX512F__)
inline Ints sum_of_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
inline Ints sum_of_pairs(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#elif defined(__SSE2__)
inline Ints sum_of_pairs(Ints a, Ints b) { return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
inline Ints sum_of_pairs(Ints a, Ints b) { return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16); }
#endif

// Adds the products of one word of A, in all places of `a`, and a vector of words of B to `sums`.
template <BlockFloat P>
Ints add_mantissas(Ints sums, Ints a, Ints b);

template <>
inline Ints add_mantissas<bfp16>(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  return sums + sum_of_pairs(a, b);
#endif
}

template <>
inline Ints add_mantissas<bfp8>(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Multiplies |b| by a with the sign of b, because the instruction multiplies unsigned by signed bytes.
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)b), _mm256_sign_epi8((__m256i)a, (__m256i)b));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)a, (int8x16_t)b);
#else
  typedef int16_t Halves __attribute__((vector_size(VECTOR_BYTES)));
  const auto even = [](Ints x) { return (Ints)((Halves)x << 8 >> 8); };
  const auto odd = [](Ints x) { return (Ints)((Halves)x >> 8); };
  return sums + sum_of_pairs(even(a), even(b)) + sum_of_pairs(odd(a), odd(b));
#endif
}

// Multiplies `blocks` times ROWS rows of A by VECTORS vectors of columns of B. In the K dimension, covers one block
// with `words` words, including its header. Stores the result in C or, with `add`, adds it. ldb is in words.
template <BlockFloat P, int64_t ROWS, int64_t VECTORS>
[[gnu::flatten]] void multiply_mantissas(int64_t blocks, int64_t words, const P* A, int64_t lda, const int32_t* B,
                                         int64_t ldb, float* C, int64_t ldc, bool add) {
  for (; blocks > 0; --blocks, A += ROWS * lda, C += ROWS * ldc) {
    Ints sums[ROWS][VECTORS] = {};
    if constexpr (HEADER_WORDS<P> > 1)
      unrolled<ROWS>([&](auto i) {
        unrolled<VECTORS>([&](auto j) { sums[i][j] = load_as<Ints>(B + ldb + j * WIDTH); });
      });
    const P* a = A + HEADER_PLACES<P>;
    const int32_t* b = B + HEADER_WORDS<P> * ldb;
#pragma GCC unroll 1  // GCC would keep some of the sums in memory
    for (int64_t k = HEADER_WORDS<P>; k < words; ++k, a += PER_WORD<P>, b += ldb) {
      Ints row[VECTORS];
      unrolled<VECTORS>([&](auto j) { row[j] = load_as<Ints>(b + j * WIDTH); });
      unrolled<ROWS>([&](auto i) {
        const Ints word = Ints{} + load_as<int32_t>(a + i * lda);
        unrolled<VECTORS>([&](auto j) { sums[i][j] = add_mantissas<P>(sums[i][j], word, row[j]); });
      });
    }
    unrolled<ROWS>([&](auto i) {
      const float scale = load_as<float>(A + i * lda);
      unrolled<VECTORS>([&](auto j) {
        float* to = C + i * ldc + j * WIDTH;
        // Products of scales are exact. An element is rounded when its sum is converted to fp32 or multiplied by them,
        // and when it is added to C.
        Floats product = __builtin_convertvector(sums[i][j], Floats) * (scale * load_as<Floats>(B + j * WIDTH));
        if (add) product += load_as<Floats>(to);
        std::memcpy(to, &product, VECTOR_BYTES);
      });
    });
  }
}

template <BlockFloat P, int64_t ROWS, int64_t VECTORS>
struct BlockFunction<int32_t, P, ROWS, VECTORS> {
  static constexpr auto value = multiply_mantissas<P, ROWS, VECTORS>;
};

// The matmul of product.h for block floating point operands. K and lda are in places, ldb in words.
template <BlockFloat P>
void multiply_block_floats(int64_t M, int64_t N, int64_t K, const P* A, int64_t lda, const P* packed, int64_t ldb,
                           float* C, int64_t ldc, bool add) {
  const auto B = reinterpret_cast<const int32_t*>(packed);
  for (int64_t k = 0, all = K / PER_WORD<P>; k < all; k += BLOCK_WORDS<P>)
    each_panel(N, [&](int64_t start, int64_t columns, int64_t width) {
      multiply_columns(M, columns, width, std::min(BLOCK_WORDS<P>, all - k), A + k * PER_WORD<P>, lda,
                       B + k * ldb + start, ldb, C + start, ldc, add || k > 0);
    });
}

}  // namespace sansgpu
