// Operands of matmuls, and their packing for `product` (product.h).
#pragma once

#include <type_traits>

#include "product.h"

namespace sansgpu {

// A row-major matrix or its transpose. `at` points to the first value, and `ld` is the leading dimension (distance
// between rows in memory).
template <typename T>
struct Operand {
  using Value = T;
  const T* at;
  int64_t ld;
  bool transposed;

  Operand turned() const { return {at, ld, !transposed}; }

  // Returns the submatrix that starts at (row, column).
  Operand from(int64_t row, int64_t column) const {
    return {at + (transposed ? column * ld + row : row * ld + column), ld, transposed};
  }
};

constexpr int64_t COLUMNS = 64;  // columns of a tile of C
constexpr int64_t TERMS = 8192;  // a sum of more terms is computed in several passes

// Columns per packed panel of B. With only 16 vector registers, `product` processes few columns at a time, and the rows
// of wider panels would conflict in the L1 cache.
#ifdef __AVX512F__
template <typename T>
constexpr int64_t PANEL = COLUMNS;
#else
template <typename T>
constexpr int64_t PANEL = std::is_same_v<T, bf16> ? COLUMNS : 16;  // bf16 that is converted to fp32 is packed again
#endif

static_assert(COLUMNS % PANEL<float> == 0, "the panels of a tile are whole");
static_assert(TERMS % 2 == 0, "a pair of bf16 is in one pass");

// Returns the places of a packed row or column: for bf16, which is multiplied in pairs, `terms` rounded up to an even
// number.
template <typename T>
constexpr int64_t padded(int64_t terms) {
  return round_up(terms, 4 / sizeof(T));
}

template <typename T>
void pack_rows(const Operand<T>& a, int64_t rows, int64_t terms, T* to, int64_t ld) {
  constexpr int64_t BLOCK = 64;
  if (a.transposed)
    for (int64_t k = 0; k < terms; k += BLOCK)
      transpose(bits(a.at) + k * a.ld, a.ld, std::min(BLOCK, terms - k), rows, bits(to) + k, ld);
  for (int64_t row = 0; row < rows; ++row) {
    if (!a.transposed) std::copy_n(a.at + row * a.ld, terms, to + row * ld);
    if (terms < padded<T>(terms)) store(to + row * ld + terms, 0.0f);
  }
}

template <typename T>
void pack_columns(const Operand<T>& b, int64_t columns, int64_t terms, T* to) {
  constexpr int64_t PAIR = 4 / sizeof(T);
  for (int64_t start = 0; start < columns; start += PANEL<T>, to += PANEL<T> * padded<T>(terms)) {
    const Operand<T> panel = b.from(0, start);
    const int64_t width = std::min(PANEL<T>, columns - start);
    if (!b.transposed) {
      pack(panel.at, b.ld, terms, padded<T>(terms), width, to);
    } else if (b.ld % PAIR == 0 && terms % PAIR == 0) {
      pack_transposed(panel.at, b.ld, width, width, terms, to);
    } else {
      for (int64_t k = 0; k < padded<T>(terms); ++k)
        for (int64_t j = 0; j < width; ++j)
          store(to + (k / PAIR * width + j) * PAIR + k % PAIR, k < terms ? load(panel.at + j * b.ld + k) : 0.0f);
    }
  }
}

}  // namespace sansgpu
