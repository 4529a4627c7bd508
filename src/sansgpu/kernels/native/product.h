// Matmuls of tiles that fit in cache, for each instruction set: AMX, AVX512_BF16, AVX-512, AVX2, NEON and portable.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace sansgpu {

// The values of block floating point matrices, whose layout block_floats.h describes: mantissas, or parts of the
// 32-bit words of a block's header.
struct bfp16 {
  int16_t mantissa;
};
struct bfp8 {
  int8_t mantissa;
};
template <typename T>
concept BlockFloat = std::is_same_v<T, bfp16> || std::is_same_v<T, bfp8>;

// Computes C (M, N) fp32 = A (M, K) B (K, N), or adds to C with `add`. B must be packed by `pack` or `pack_transposed`,
// and both operands by `pack_rows` and `pack_columns` for block floats. K must be positive, and even for bf16; for block
// floats it is the number of packed places. The summation order depends only on the shape. Defined for float, bf16,
// bfp16 and bfp8.
template <typename T>
void product(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C, int64_t ldc,
             bool add);

// Releases the state that this thread keeps between matmuls (AMX tiles). Must be called at the end of a parallel
// region.
void end_products();

}  // namespace sansgpu
