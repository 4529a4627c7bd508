// The kernel of kernels/newton_schulz.py.

#include <vector>

#include "blocks.h"
#include "matmul.h"

namespace sansgpu {
namespace {

// Stores the product of two matrices, or alpha times the product plus beta times a third matrix, in each case plus a
// multiple of the identity.
template <typename T>
struct Blend {
  T* to;
  const T* third;  // may be null
  float alpha, beta, diagonal;
  int64_t ld;

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    const float a = alpha, b = beta;  // local copies, because the compiler cannot rule out that writes alias them
    const int64_t at = row * ld + column;
    if (third != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] = a * sums[j] + b * load(third + at + j);
    if (row >= column && row < column + count) sums[row - column] += diagonal;
    store_row(to + at, sums, count);
  }
};

// A batch of matrices that are consecutive in memory, or of their transposes.
template <typename T>
struct Batch {
  T* at;
  int64_t rows, columns;
  bool transposed = false;

  Batch turned() const { return {at, columns, rows, !transposed}; }
  T* matrix(int64_t i) const { return at + i * rows * columns; }
  Operand<T> operand(int64_t i) const { return {matrix(i), transposed ? rows : columns, transposed}; }
};

// Operations on batches of `count` matrices. Each uses all threads and processes all matrices at the same time.
template <typename T>
struct Batches {
  int64_t count;

  // Computes out = A B + diagonal I, or alpha A B + beta third + diagonal I. `symmetric`, for results that are known to
  // be symmetric, halves the work.
  void multiply(const Batch<T>& a, const Batch<T>& b, const Batch<T>& out, bool symmetric, const T* third = nullptr,
                float alpha = 1.0f, float beta = 0.0f, float diagonal = 0.0f) const {
    std::vector<Multiplication<T, Blend<T>>> all;
    all.reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      const T* added = third == nullptr ? nullptr : third + i * out.rows * out.columns;
      all.emplace_back(Product<T>{out.rows, out.columns, a.columns, a.operand(i), b.operand(i), nullptr, false, nullptr,
                                  symmetric},
                       Blend<T>{out.matrix(i), added, alpha, beta, diagonal, out.columns});
    }
    all[0].run_together(all.data(), count);
  }

  // Divides matrices by their Frobenius norms. Sums of blocks are added in order, so that results do not depend on the
  // number of threads.
  void normalize(const float* from, const Batch<T>& to) const {
    const int64_t size = to.rows * to.columns;
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
      for (int64_t i = at; i < at + b.count; ++i) store(to.at + i, from[i] * factor);
    });
  }
};

// Applies the polynomial a x + b x^3 + c x^5 to all singular values.
struct Polynomial {
  float a, b, c;
};

// Applies `steps` polynomials, one after the other.
template <typename T>
void orthogonalize(int64_t count, const Polynomial* polynomials, int64_t steps, bool by_gram, const float* from,
                   Batch<T> out) {
  const Batches<T> batches{count};
  const bool wide = out.rows <= out.columns;
  const int64_t side = std::min(out.rows, out.columns), size = count * side * side;
  Buffer<T> other_memory(count * out.rows * out.columns), memory_1(size), memory_2(size);
  Batch<T> x{other_memory, out.rows, out.columns}, y = out;
  Batch<T> gram{memory_1, side, side}, factor{memory_2, side, side};
  const auto times = [&](const Batch<T>& square, const Batch<T>& to, const T* third, float beta) {
    batches.multiply(wide ? square : x, wide ? x : square, to, false, third, 1.0f, beta);
  };
  const auto make_gram = [&] { batches.multiply(wide ? x : x.turned(), wide ? x.turned() : x, gram, true); };
  if (!by_gram) {
    if (steps % 2 == 0) std::swap(x, y);
    batches.normalize(from, x);
    for (int64_t step = 0; step < steps; ++step, std::swap(x, y)) {
      const Polynomial p = polynomials[step];
      make_gram();
      batches.multiply(gram, gram, factor, true, gram.at, p.c, p.b);
      times(factor, y, x.at, p.a);
    }
    return;
  }
  // All steps are polynomials in the Gram matrix, so they commute and their products are symmetric.
  Buffer<T> memory_3(size), memory_4(size);
  Batch<T> total{memory_3, side, side}, next{memory_4, side, side};
  batches.normalize(from, x);
  make_gram();
  for (int64_t step = 0; step < steps; ++step) {
    const Polynomial p = polynomials[step];
    batches.multiply(gram, gram, factor, true, gram.at, p.c, p.b, p.a);
    if (step + 1 < steps) {
      batches.multiply(gram, factor, next, true);
      batches.multiply(factor, next, gram, true);
    }
    if (step > 0) batches.multiply(factor, total, next, true);
    std::swap(total, step > 0 ? next : factor);
  }
  times(total, out, nullptr, 0.0f);
}

}  // namespace

// Orthogonalizes `count` fp32 matrices (rows, columns) by Newton-Schulz iteration in the dtype of `out`. `coefficients`
// are three per step. With `by_gram`, iterates on the smaller Gram matrix.
SANSGPU_KERNEL void newton_schulz(int64_t narrow, int64_t by_gram, int64_t count, int64_t rows, int64_t columns,
                                  const float* matrices, void* out, const float* coefficients, int64_t steps) {
  std::vector<Polynomial> polynomials;
  for (const float* c = coefficients; c < coefficients + 3 * steps; c += 3) polynomials.push_back({c[0], c[1], c[2]});
  const Polynomial* each = polynomials.data();
  narrow ? orthogonalize<bf16>(count, each, steps, by_gram != 0, matrices, {static_cast<bf16*>(out), rows, columns})
         : orthogonalize<float>(count, each, steps, by_gram != 0, matrices, {static_cast<float*>(out), rows, columns});
}

}  // namespace sansgpu
