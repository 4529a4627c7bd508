// Matmuls of linear layers with a LoRA adapter for kernels/lora.py.

#include "matmul.h"

namespace sansgpu {
namespace {

// Adds a row of H (., R) times a panel of a table (R, COLUMNS) to a whole tile's part of a row of C.
template <typename T>
void add_low_rank(const T* h, int64_t R, const float* panel, float* sums) {
  float own[COLUMNS];  // stay in registers
  std::memcpy(own, sums, sizeof(own));
  for (int64_t k = 0; k < R; ++k, panel += COLUMNS) {
    const float factor = load(h + k);
    for (int64_t j = 0; j < COLUMNS; ++j) own[j] += factor * panel[j];
  }
  std::memcpy(sums, own, sizeof(own));
}

// Stores rows of C after adding the bias and the low-rank product H (M, R) times a table (R, N).
template <typename T>
struct StoreWithAdapter {
  T* to;
  int64_t ld;
  const float* bias;  // may be null
  const T* h;
  int64_t R;
  const float* table;  // in panels of COLUMNS columns

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    if (bias != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] += bias[column + j];
    for (int64_t done = 0; done < count;) {
      const int64_t start = (column + done) % COLUMNS, width = std::min(COLUMNS - start, count - done);
      const float* panel = table + (column + done - start) * R + start;
      if (width == COLUMNS)
        add_low_rank(h + row * R, R, panel, sums + done);
      else
        for (int64_t k = 0; k < R; ++k)
          for (int64_t j = 0; j < width; ++j) sums[done + j] += load(h + row * R + k) * panel[k * COLUMNS + j];
      done += width;
    }
    store_row(to + row * ld + column, sums, count);
  }
};

// Widens a table (R, N), or the transpose of a matrix (N, R), to fp32 and packs it in panels of COLUMNS columns.
template <typename T>
void pack_table(const Operand<T>& table, int64_t R, int64_t N, float* to) {
  constexpr int64_t PANELS = 8;  // per unit of work
  parallel_each(divide_up(N, PANELS * COLUMNS), [&](int64_t unit) {
    for (int64_t column = unit * PANELS * COLUMNS; column < std::min(N, (unit + 1) * PANELS * COLUMNS); ++column)
      for (int64_t k = 0; k < R; ++k)
        to[(column / COLUMNS * R + k) * COLUMNS + column % COLUMNS] = load(table.from(k, column).at);
  });
}

}  // namespace

// Stores C (M, N) = A (M, K) B (K, N) + bias (N,) + H (M, R) D (R, N) in `out`; all but the bias have one dtype. With
// `transposed`, B and D are the transposes of the matrices in memory. `bias` may be null.
SANSGPU_KERNEL void lora_matmul(int64_t narrow, int64_t M, int64_t N, int64_t K, int64_t R, const void* a,
                                const void* b, int64_t transposed, const float* bias, const void* h, const void* d,
                                void* out) {
  const auto multiply = [&]<typename T>(T* to) {
    const auto right = [&](const void* at, int64_t terms) {
      return Operand<T>{static_cast<const T*>(at), transposed != 0 ? terms : N, transposed != 0};
    };
    Buffer<float> table(R * round_up(N, COLUMNS));
    pack_table<T>(right(d, R), R, N, table);
    const StoreWithAdapter<T> finish{to, N, bias, static_cast<const T*>(h), R, table};
    Multiplication<T, StoreWithAdapter<T>>({M, N, K, {static_cast<const T*>(a), K, false}, right(b, K)}, finish).run();
  };
  narrow ? multiply(static_cast<bf16*>(out)) : multiply(static_cast<float*>(out));
}

}  // namespace sansgpu
