// Matmuls whose sums stay in vector registers. GCC and Clang translate the vectors to those of the instruction set.
//
// Operands are read in words: fp32 values or, if the processor multiplies them, pairs of bf16.
#pragma once

#include <utility>

#include "tiles.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace sansgpu {

// The size and the number of vector registers.
#if defined(__AVX512F__)
constexpr int64_t VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int64_t VECTOR_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int64_t VECTOR_BYTES = 16, REGISTERS = 32;
#else
constexpr int64_t VECTOR_BYTES = 16, REGISTERS = 16;
#endif
constexpr int64_t WIDTH = VECTOR_BYTES / 4;  // words in a vector

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Pairs __attribute__((vector_size(VECTOR_BYTES)));

// Add the products of one word of A and a vector of words of B.
inline Floats add_products(Floats sums, float a, Floats b) { return sums + a * b; }

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_PAIRS = true;
inline Floats add_products(Floats sums, uint32_t a, Pairs b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool MULTIPLIES_PAIRS = true;
inline Floats add_products(Floats sums, uint32_t a, Pairs b) {
  return (Floats)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)vdupq_n_u32(a), (bfloat16x8_t)b);
}
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

template <typename V>
inline V load_as(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// Calls run with the constants 0 ... COUNT - 1. Compilers keep arrays in registers only if every index is a constant.
template <int64_t COUNT, typename F>
constexpr void unrolled(const F& run) {
  [&]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
    (run(std::integral_constant<int64_t, I>()), ...);
  }(std::make_integer_sequence<int64_t, COUNT>());
}

// C (ROWS, VECTORS * WIDTH) = A B over `depth` words, or += with `add`. lda is in units of T, ldb in words.
template <typename Word, typename T, int64_t ROWS, int64_t VECTORS>
[[gnu::flatten]] void multiply_block(int64_t depth, const T* A, int64_t lda, const Word* B, int64_t ldb, float* C,
                                     int64_t ldc, bool add) {
  typedef Word Words __attribute__((vector_size(VECTOR_BYTES)));
  Floats sums[ROWS][VECTORS];
  unrolled<ROWS>([&](auto i) {
    unrolled<VECTORS>([&](auto j) { sums[i][j] = add ? load_as<Floats>(C + i * ldc + j * WIDTH) : Floats{}; });
  });
  for (int64_t k = 0; k < depth; ++k, A += sizeof(Word) / sizeof(T), B += ldb) {
    Words b[VECTORS];
    unrolled<VECTORS>([&](auto j) { b[j] = load_as<Words>(B + j * WIDTH); });
    unrolled<ROWS>([&](auto i) {
      const Word a = load_as<Word>(A + i * lda);
      unrolled<VECTORS>([&](auto j) { sums[i][j] = add_products(sums[i][j], a, b[j]); });
    });
  }
  unrolled<ROWS>([&](auto i) {
    unrolled<VECTORS>([&](auto j) { std::memcpy(C + i * ldc + j * WIDTH, &sums[i][j], VECTOR_BYTES); });
  });
}

// The largest block of which sums and operands fit into the registers.
constexpr int64_t MOST_VECTORS = REGISTERS / 8, MOST_ROWS = 12;
constexpr int64_t most_rows(int64_t vectors) { return std::min(MOST_ROWS, REGISTERS * 3 / 4 / vectors); }

template <typename Word, typename T>
struct BlockFunctions {
  void (*of[MOST_VECTORS][MOST_ROWS])(int64_t, const T*, int64_t, const Word*, int64_t, float*, int64_t, bool) = {};

  constexpr BlockFunctions() {
    unrolled<MOST_VECTORS>([&](auto v) {
      unrolled<most_rows(v + 1)>([&](auto r) { of[v][r] = multiply_block<Word, T, r + 1, v + 1>; });
    });
  }
};

// multiply_block for every number of vectors and rows, less one.
template <typename Word, typename T>
constexpr BlockFunctions<Word, T> BLOCK_FUNCTIONS;

// The words of K and the rows of A that are multiplied at once, so that both operands stay in cache.
constexpr int64_t DEPTH = 256, WIDENED_ROWS = 64;

// Multiplies A (M, depth) with a panel of B (depth, columns), of which whole vectors can be read.
template <typename Word, typename T>
void multiply_panel(int64_t M, int64_t columns, int64_t depth, const T* A, int64_t lda, const Word* B, int64_t ldb,
                    float* C, int64_t ldc, bool add) {
  const int64_t vectors = divide_up(columns, WIDTH), width = vectors * WIDTH, blocks = divide_up(M, most_rows(vectors));
  alignas(64) float wide[MOST_ROWS * MOST_VECTORS * WIDTH];
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = block * M / blocks, rows = (block + 1) * M / blocks - row;
    const auto multiply = BLOCK_FUNCTIONS<Word, T>.of[vectors - 1][rows - 1];
    float* to = C + row * ldc;
    if (columns == width) {
      multiply(depth, A + row * lda, lda, B, ldb, to, ldc, add);
      continue;
    }
    multiply(depth, A + row * lda, lda, B, ldb, wide, width, false);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) to[i * ldc + j] = (add ? to[i * ldc + j] : 0.0f) + wide[i * width + j];
  }
}

// Calls run(start, columns, width) for panels of N columns, where `width` is the columns rounded up to whole vectors.
template <typename F>
void each_panel(int64_t N, const F& run) {
  const int64_t vectors = divide_up(N, WIDTH), panels = divide_up(vectors, MOST_VECTORS);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t start = panel * vectors / panels * WIDTH, end = (panel + 1) * vectors / panels * WIDTH;
    run(start, std::min(end, N) - start, end - start);
  }
}

// The matmul of product.h by words, of which K has `depth`.
template <typename Word, typename T>
void multiply_words(int64_t M, int64_t N, int64_t depth, const T* A, int64_t lda, const Word* B, int64_t ldb, float* C,
                    int64_t ldc, bool add) {
  alignas(64) Word padded[DEPTH * MOST_VECTORS * WIDTH];
  for (int64_t k = 0; k < depth; k += DEPTH, A += DEPTH * sizeof(Word) / sizeof(T), B += DEPTH * ldb) {
    const int64_t words = std::min(DEPTH, depth - k);
    each_panel(N, [&](int64_t start, int64_t columns, int64_t width) {
      const Word* panel = B + start;
      if (columns < width) {
        for (int64_t row = 0; row < words; ++row) {
          std::copy_n(panel + row * ldb, columns, padded + row * width);
          std::fill_n(padded + row * width + columns, width - columns, Word(0));
        }
        panel = padded;
      }
      const int64_t ld = columns < width ? width : ldb;
      multiply_panel(M, columns, words, A, lda, panel, ld, C + start, ldc, add || k > 0);
    });
  }
}

// The matmul of product.h for bf16 on processors that multiply only fp32. B holds pairs.
inline void multiply_widened(int64_t M, int64_t N, int64_t K, const bf16* A, int64_t lda, const uint32_t* B, int64_t ldb,
                             float* C, int64_t ldc, bool add) {
  alignas(64) float wide_a[WIDENED_ROWS * DEPTH], wide_b[DEPTH * MOST_VECTORS * WIDTH];
  for (int64_t k = 0; k < K; k += DEPTH, B += DEPTH / 2 * ldb)
    for (int64_t row = 0; row < M; row += WIDENED_ROWS) {
      const int64_t depth = std::min(DEPTH, K - k), rows = std::min(WIDENED_ROWS, M - row);
      for (int64_t i = 0; i < rows; ++i) {
        const uint16_t* from = bits(A + (row + i) * lda + k);
        for (int64_t c = 0; c < depth; ++c) wide_a[i * depth + c] = widen(from[c]);
      }
      each_panel(N, [&](int64_t start, int64_t columns, int64_t width) {
        for (int64_t pair = 0; pair < depth / 2; ++pair) {
          const uint32_t* from = B + pair * ldb + start;
          float* to = wide_b + 2 * pair * width;
          for (int64_t c = 0; c < width; ++c) {
            const uint32_t both = c < columns ? from[c] : 0;
            to[c] = widen(static_cast<uint16_t>(both));
            to[width + c] = widen(static_cast<uint16_t>(both >> 16));
          }
        }
        multiply_panel(rows, columns, depth, wide_a, depth, wide_b, width, C + row * ldc + start, ldc, add || k > 0);
      });
    }
}

}  // namespace sansgpu
