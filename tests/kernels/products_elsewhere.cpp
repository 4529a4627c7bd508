// Compares matrix products with float64 and prints the largest error of each dtype, relative to the bound for rounding
// errors. Tests compile it for other processors.

#include <cstdio>
#include <type_traits>

#include "block_floats.h"

using namespace sansgpu;

namespace {

uint32_t state = 1;

float draw() {  // exact in bf16; magnitudes differ so much that sums are rounded
  state = state * 1664525u + 1013904223u;
  return std::ldexp(static_cast<float>(static_cast<int>(state >> 24) - 128), -static_cast<int>(state >> 16 & 15));
}

template <typename T>
double error(int64_t M, int64_t N, int64_t K, int64_t gap, bool transposed, bool add) {
  constexpr int64_t STEP = std::is_same_v<T, float> ? 1 : 2;  // rows that are packed together
  const int64_t lda = K + gap, ldb = N + (transposed ? 0 : gap), ldc = N + gap;
  Buffer<T> A(M * lda), B(K * N), packed(K * ldb);
  Buffer<float> C(M * ldc), before(M * ldc);
  for (int64_t i = 0; i < M * lda; ++i) store(A + i, draw());
  for (int64_t i = 0; i < K * N; ++i) store(B + i, draw());
  for (int64_t i = 0; i < M * ldc; ++i) before[i] = C[i] = draw();
  if (transposed)
    pack_transposed(B, K, N, N, K, packed);
  else
    for (int64_t k = 0; k < K; k += STEP) pack(B + k * N, N, STEP, STEP, N, packed + k * ldb);
  product<T>(M, N, K, A, lda, packed, ldb, C, ldc, add);
  double worst = 0;
  for (int64_t i = 0; i < M; ++i) {
    for (int64_t j = 0; j < N; ++j) {
      double sum = add ? before[i * ldc + j] : 0, magnitude = std::fabs(sum);
      for (int64_t k = 0; k < K; ++k) {
        const double term = static_cast<double>(load(A + i * lda + k)) * load(transposed ? B + j * K + k : B + k * N + j);
        sum += term;
        magnitude += std::fabs(term);
      }
      const double bound = (K + 2) * std::ldexp(1.0, -24) * magnitude + 1e-30;
      worst = std::max(worst, std::fabs(C[i * ldc + j] - sum) / bound);
    }
    for (int64_t j = N; j < ldc; ++j)
      if (C[i * ldc + j] != before[i * ldc + j]) worst = 1e9;  // written outside C
  }
  return worst;
}

constexpr int64_t SHAPES[][3] = {{64, 64, 64}, {16, 64, 80}, {1, 1, 2},    {7, 33, 30},
                                 {13, 5, 600}, {61, 83, 78}, {70, 100, 26}};

template <typename T>
double worst_error() {
  double worst = 0;
  for (const auto& [M, N, K] : SHAPES)
    for (int64_t kind = 0; kind < 8; ++kind)
      worst = std::max(worst, error<T>(M, N, K, kind & 1 ? 6 : 0, kind & 2, kind & 4));
  return worst;
}

// Replaces terms by those that rotate_row turns into them. Its matrix is a symmetric one times signs.
void rotate_back(float* x, int64_t terms) {
  const auto multiply_signs = [=] {
    each_piece(terms, [=](int64_t k, auto lines) {
      for (int64_t i = 0; i < lines * LINE; ++i) x[k + i] *= sign_of(i / LINE, i % 4);
    });
  };
  multiply_signs();
  rotate_row(x, terms);
  multiply_signs();
}

// Replaces K terms at a distance of `step` by those whose mantissas they are.
template <typename P>
void store_terms_of(float* x, int64_t K, int64_t step) {
  if constexpr (ROTATES<P>) {
    Buffer<float> terms(K);
    for (int64_t k = 0; k < K; ++k) terms[k] = x[k * step];
    each_block<P>(K, [&](int64_t k, int64_t count, int64_t) { rotate_back(terms + k, count); });
    for (int64_t k = 0; k < K; ++k) x[k * step] = terms[k];
  }
}

// Multiplies integers that block floating point represents exactly: every block has the largest mantissa of P.
template <typename P>
double integer_error(int64_t M, int64_t N, int64_t K, bool transposed, bool add) {
  constexpr int64_t LARGEST = BlockFormat<P>::LARGEST;
  const int64_t places = padded<P>(K), ld = places + PER_WORD<P>;
  Buffer<float> A(M * K), B(K * N), C(M * N), before(M * N);
  Buffer<float> own_a(M * K), own_b(K * N);
  Buffer<P> left(M * ld), right(round_up(N, COLUMNS) * places);
  const auto integer = [](int64_t k) {
    draw();
    const int64_t drawn = static_cast<int64_t>(state >> 16) % (2 * LARGEST + 1) - LARGEST;
    return static_cast<float>(k % BLOCK_TERMS<P> == 0 ? LARGEST : drawn);
  };
  for (int64_t i = 0; i < M * K; ++i) A[i] = integer(i % K);
  for (int64_t i = 0; i < K * N; ++i) B[i] = integer(transposed ? i % K : i / N);
  for (int64_t i = 0; i < M * N; ++i) before[i] = C[i] = integer(1);
  std::copy_n(static_cast<float*>(A), M * K, static_cast<float*>(own_a));
  std::copy_n(static_cast<float*>(B), K * N, static_cast<float*>(own_b));
  for (int64_t i = 0; i < M; ++i) store_terms_of<P>(own_a + i * K, K, 1);
  for (int64_t j = 0; j < N; ++j) store_terms_of<P>(own_b + (transposed ? j * K : j), K, transposed ? 1 : N);
  pack_rows(Operand<float>{own_a, K, false}, M, K, static_cast<P*>(left), ld);
  pack_columns(Operand<float>{own_b, transposed ? K : N, transposed}, N, K, static_cast<P*>(right));
  for (int64_t j = 0; j < N; j += PANEL<P>)
    product<P>(M, std::min(PANEL<P>, N - j), places, left, ld, right + j * places, PANEL<P>, C + j, N, add);
  double worst = 0;
  for (int64_t i = 0; i < M; ++i)
    for (int64_t j = 0; j < N; ++j) {
      double sum = add ? before[i * N + j] : 0, magnitude = std::fabs(sum);
      for (int64_t k = 0; k < K; ++k) {
        const double term = static_cast<double>(A[i * K + k]) * B[transposed ? j * K + k : k * N + j];
        sum += term;
        magnitude += std::fabs(term);
      }
      worst = std::max(worst, std::fabs(C[i * N + j] - sum) / (4 * std::ldexp(1.0, -24) * magnitude + 1e-30));
    }
  return worst;
}

template <typename P>
double worst_integer_error() {
  double worst = 0;
  for (const auto& [M, N, K] : SHAPES)
    for (int64_t kind = 0; kind < 4; ++kind) worst = std::max(worst, integer_error<P>(M, N, K, kind & 1, kind & 2));
  return worst;
}

}  // namespace

int main() {
  std::printf("%.3f %.3f %.3f %.3f\n", worst_error<float>(), worst_error<bf16>(), worst_integer_error<bfp16>(),
              worst_integer_error<bfp8>());
}
