// Scatter-add of rows, for the gradients of embeddings; kernels/embedding.py has the reference.

#include "parallel.h"

namespace sansgpu {
namespace {

constexpr int64_t WIDTH_OF_UNIT = 64;  // columns per unit of work

// Adds the rows whose indices are in [first, end) to `total`, in order; only WIDTH_OF_UNIT columns, the first of which
// is `column`.
template <typename T>
void add_rows(int64_t N, int64_t D, const int64_t* indices, const T* rows, const float* factors, float* total,
              int64_t first, int64_t end, int64_t column) {
  const int64_t columns = std::min(WIDTH_OF_UNIT, D - column);
  for (int64_t i = 0; i < N; ++i) {
    if (indices[i] < first || indices[i] >= end) continue;
    const T* from = rows + i * D + column;
    float* to = total + indices[i] * D + column;
    const float factor = factors == nullptr ? 1.0f : factors[i];
    for (int64_t j = 0; j < columns; ++j) to[j] += factor * load(from + j);
  }
}

}  // namespace

// Computes total[indices[i]] += factors[i] * rows[i] for all i: total (V, D), rows (N, D), factors (N,) or null for 1.
// Every unit reads all indices but adds only some of the rows, so that the order of sums does not depend on the number
// of units.
SANSGPU_KERNEL void add_rows(int64_t narrow, int64_t N, int64_t D, int64_t V, const int64_t* indices, const void* rows,
                             const float* factors, float* total) {
  const int64_t across = divide_up(D, WIDTH_OF_UNIT);
  const int64_t down = divide_up(4 * omp_get_max_threads(), std::max<int64_t>(1, across));
  parallel_each(down * across, [&](int64_t unit) {
    const int64_t part = unit / across, first = part * V / down, end = (part + 1) * V / down;
    const int64_t column = unit % across * WIDTH_OF_UNIT;
    narrow ? add_rows(N, D, indices, static_cast<const bf16*>(rows), factors, total, first, end, column)
           : add_rows(N, D, indices, static_cast<const float*>(rows), factors, total, first, end, column);
  });
}

}  // namespace sansgpu
