// Several matmuls in one call.
#pragma once

#include "tiles.h"

namespace sansgpu {

// Stores C (M, N) = A (M, K) B (K, N) + bias (N,) in `out`, in the dtype of A and B. If `total` is not null, C is stored
// there in fp32, or added with `add`, without a bias, and then `out`, which may be null, gets its rounded values. `bias`
// and `row_sums` may be null; see Product.
struct Matmul {
  int64_t M, N, K;
  const void* a;
  int64_t lda, a_transposed;
  const void* b;
  int64_t ldb, b_transposed;
  const float* bias;
  void* out;
  float* total;
  int64_t add;
  float* row_sums;
};

}  // namespace sansgpu
