// Kernels for kernels/newton_schulz.py. A batch of matrices is one contiguous tensor.

#include <vector>

#include "blocks.h"
#include "matmul.h"

namespace sansgpu {
namespace {

// Stores a product of two matrices, or alpha times the product plus beta times a third matrix.
template <typename T>
struct Blend {
  T* to;
  const T* third;  // may be null
  float alpha, beta;
  int64_t ld;

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    const float a = alpha, b = beta;  // local copies, because the compiler cannot rule out that writes alias them
    const int64_t at = row * ld + column;
    if (third != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] = a * sums[j] + b * load(third + at + j);
    store_row(to + at, sums, count);
  }
};

}  // namespace

// Divides each of `count` fp32 arrays of `size` values by its 2-norm.
SANSGPU_KERNEL void normalize(int64_t narrow, int64_t count, int64_t size, const float* from, void* to) {
  const Blocks blocks(count, [=](int64_t) { return size; });
  Buffer<double> sums(blocks.end(count - 1));
  blocks.each([&](const Block& b) { sums[b.unit] = squares(from + b.array * size + b.start, b.count); });
  Buffer<float> factors(count);
  for (int64_t array = 0; array < count; ++array) {
    double total = 0;
    for (int64_t unit = blocks.end(array - 1); unit < blocks.end(array); ++unit) total += sums[unit];
    factors[array] = static_cast<float>(1.0 / (std::sqrt(total) + 1e-7));
  }
  blocks.each([&](const Block& b) {
    const int64_t at = b.array * size + b.start;
    const float factor = factors[b.array];
    const auto scale = [=](auto* to) {
      for (int64_t i = 0; i < b.count; ++i) store(to + at + i, from[at + i] * factor);
    };
    narrow ? scale(static_cast<bf16*>(to)) : scale(static_cast<float*>(to));
  });
}

// out (M, N) = alpha A (M, K) B (K, N) + beta third (M, N) for each of `count` matrices; `third` may be null if alpha
// is 1. With `symmetric`, the result is known to be symmetric, which saves half of the work.
SANSGPU_KERNEL void matmul_batch(int64_t narrow, int64_t count, int64_t M, int64_t N, int64_t K, const void* a,
                                 int64_t a_transposed, const void* b, int64_t b_transposed, const void* third,
                                 double alpha, double beta, int64_t symmetric, void* out) {
  const auto multiply = [&]<typename T>(T* to) {
    std::vector<Multiplication<T, Blend<T>>> all;
    all.reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      const Operand<T> left{static_cast<const T*>(a) + i * M * K, a_transposed ? M : K, a_transposed != 0};
      const Operand<T> right{static_cast<const T*>(b) + i * K * N, b_transposed ? K : N, b_transposed != 0};
      const T* added = third == nullptr ? nullptr : static_cast<const T*>(third) + i * M * N;
      const Blend<T> finish{to + i * M * N, added, static_cast<float>(alpha), static_cast<float>(beta), N};
      all.emplace_back(Product<T>{M, N, K, left, right, nullptr, false, nullptr, symmetric != 0}, finish);
    }
    all[0].run_together(all.data(), count);
  };
  narrow ? multiply(static_cast<bf16*>(out)) : multiply(static_cast<float*>(out));
}

}  // namespace sansgpu
