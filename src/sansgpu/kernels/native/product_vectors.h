// Matmuls whose sums stay in vector registers, written with GCC's and Clang's vector extensions for all instruction
// sets.
//
// Operands are read in words of 32 bits: fp32 values or, if the processor supports bf16 products, pairs of bf16 values.
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
constexpr int64_t WIDTH = VECTOR_BYTES / 4;  // words per vector

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Pairs __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));

// These functions add the products of one word of A and a vector of words of B to `sums`.
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

// Calls run with the constants 0 to COUNT - 1, because compilers keep arrays in registers only if all indices are
// constants.
template <int64_t COUNT, typename F>
constexpr void unrolled(const F& run) {
  [&]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
    (run(std::integral_constant<int64_t, I>()), ...);
  }(std::make_integer_sequence<int64_t, COUNT>());
}

// Multiplies `blocks` blocks of ROWS rows of A with VECTORS vectors of B, over `depth` words of K. Stores the result in
// C or, with `add`, adds it. lda is in units of T, ldb in words.
template <typename Word, typename T, int64_t ROWS, int64_t VECTORS>
[[gnu::flatten]] void multiply_blocks(int64_t blocks, int64_t depth, const T* A, int64_t lda, const Word* B,
                                      int64_t ldb, float* C, int64_t ldc, bool add) {
  typedef Word Words __attribute__((vector_size(VECTOR_BYTES)));
  for (; blocks > 0; --blocks, A += ROWS * lda, C += ROWS * ldc) {
    Floats sums[ROWS][VECTORS];
    unrolled<ROWS>([&](auto i) {
      unrolled<VECTORS>([&](auto j) { sums[i][j] = add ? load_as<Floats>(C + i * ldc + j * WIDTH) : Floats{}; });
    });
    const T* a = A;
    const Word* b = B;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; ++k, a += sizeof(Word) / sizeof(T), b += ldb) {
      Words row[VECTORS];
      unrolled<VECTORS>([&](auto j) { row[j] = load_as<Words>(b + j * WIDTH); });
      unrolled<ROWS>([&](auto i) {
        const Word word = load_as<Word>(a + i * lda);
        unrolled<VECTORS>([&](auto j) { sums[i][j] = add_products(sums[i][j], word, row[j]); });
      });
    }
    unrolled<ROWS>([&](auto i) {
      unrolled<VECTORS>([&](auto j) { std::memcpy(C + i * ldc + j * WIDTH, &sums[i][j], VECTOR_BYTES); });
    });
  }
}

// Maximum sizes of a block whose sums and operands fit into the registers.
constexpr int64_t MOST_VECTORS = REGISTERS / 8, MOST_BLOCK_ROWS = 8;
constexpr int64_t most_rows(int64_t vectors) { return std::min(MOST_BLOCK_ROWS, REGISTERS * 3 / 4 / vectors); }

// The function that multiplies blocks of words; product_mantissas.h has another one.
template <typename Word, typename T, int64_t ROWS, int64_t VECTORS>
struct BlockFunction {
  static constexpr auto value = multiply_blocks<Word, T, ROWS, VECTORS>;
};

// A table of these functions for every number of vectors and rows.
template <typename Word, typename T>
class BlockFunctions {
 public:
  constexpr BlockFunctions() {
    unrolled<MOST_VECTORS>([&](auto v) {
      unrolled<most_rows(v + 1)>([&](auto r) { functions_[v][r] = BlockFunction<Word, T, r + 1, v + 1>::value; });
    });
  }
  constexpr auto of(int64_t vectors, int64_t rows) const { return functions_[vectors - 1][rows - 1]; }

 private:
  using Function = void (*)(int64_t, int64_t, const T*, int64_t, const Word*, int64_t, float*, int64_t, bool);
  Function functions_[MOST_VECTORS][MOST_BLOCK_ROWS] = {};
};

// Multiplies A (M, depth) with a panel of B (depth, width); `width` is a multiple of WIDTH.
template <typename Word, typename T>
void multiply_panel(int64_t M, int64_t width, int64_t depth, const T* A, int64_t lda, const Word* B, int64_t ldb,
                    float* C, int64_t ldc, bool add) {
  static constexpr BlockFunctions<Word, T> FUNCTIONS;
  if (M == 0) return;
  const int64_t vectors = width / WIDTH, blocks = divide_up(M, most_rows(vectors));
  const int64_t rows = M / blocks, larger = M % blocks, row = larger * (rows + 1);  // `larger` blocks have one more row
  if (larger) FUNCTIONS.of(vectors, rows + 1)(larger, depth, A, lda, B, ldb, C, ldc, add);
  FUNCTIONS.of(vectors, rows)(blocks - larger, depth, A + row * lda, lda, B, ldb, C + row * ldc, ldc, add);
}

// Multiplies A (M, depth) with a panel of B (depth, width), but writes only the first columns of C.
template <typename Word, typename T>
void multiply_columns(int64_t M, int64_t columns, int64_t width, int64_t depth, const T* A, int64_t lda, const Word* B,
                      int64_t ldb, float* C, int64_t ldc, bool add) {
  if (columns == width) return multiply_panel(M, width, depth, A, lda, B, ldb, C, ldc, add);
  constexpr int64_t MOST = 4 * MOST_BLOCK_ROWS;
  alignas(64) float whole[MOST * MOST_VECTORS * WIDTH];
  for (int64_t row = 0; row < M; row += MOST) {
    const int64_t rows = std::min(MOST, M - row);
    multiply_panel(rows, width, depth, A + row * lda, lda, B, ldb, whole, width, false);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = C + (row + i) * ldc;
      for (int64_t j = 0; j < columns; ++j) to[j] = (add ? to[j] : 0.0f) + whole[i * width + j];
    }
  }
}

// Words of K and rows of A per pass, so that both operands stay in cache.
constexpr int64_t DEPTH = 256, WIDENED_ROWS = 64;
static_assert(DEPTH % 2 == 0, "widened pairs of bf16 are multiplied at once");

// Calls run(start, columns, width) for each panel of the N columns, where `width` is `columns` rounded up to full
// vectors.
template <typename F>
void each_panel(int64_t N, const F& run) {
  const int64_t vectors = divide_up(N, WIDTH), panels = divide_up(vectors, MOST_VECTORS);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t start = panel * vectors / panels * WIDTH, end = (panel + 1) * vectors / panels * WIDTH;
    run(start, std::min(end, N) - start, end - start);
  }
}

// The matmul of product.h in units of words; K has `depth` words.
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
      multiply_columns(M, columns, width, words, A, lda, panel, ld, C + start, ldc, add || k > 0);
    });
  }
}

// The matmul of product.h for bf16 on processors that multiply only fp32. B consists of pairs.
inline void multiply_widened(int64_t M, int64_t N, int64_t K, const bf16* A, int64_t lda, const uint32_t* B,
                             int64_t ldb, float* C, int64_t ldc, bool add) {
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
        multiply_columns(rows, columns, width, depth, wide_a, depth, wide_b, width, C + row * ldc + start, ldc,
                         add || k > 0);
      });
    }
}

}  // namespace sansgpu
