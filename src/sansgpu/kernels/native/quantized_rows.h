// Products with a matrix that stays quantized: a right operand of Multiplication, and a product for few rows.
#pragma once

#include "block_formats.h"
#include "matmul.h"

namespace sansgpu {

// Widens `count` values, from `start` on, of consecutive rows. Both are multiples of GROUP.
template <typename Format, typename T>
void decode_rows(const uint8_t* from, int64_t ld, int64_t rows, int64_t start, int64_t count, T* to, int64_t ld_to) {
  for (int64_t row = 0; row < rows; ++row, from += ld, to += ld_to)
    for (int64_t i = 0; i < count; i += GROUP) {
      float values[GROUP];
      Format::decode(from + (start + i) / Format::VALUES * Format::BYTES, (start + i) % Format::VALUES / GROUP, values);
      store_row(to + i, values, GROUP);
    }
}

// A quantized matrix W (O, I), or its transpose, without its first rows and columns. `ld` is the bytes of a row.
template <typename T>
struct QuantizedRows {
  template <typename To>
  using Decode = void (*)(const uint8_t*, int64_t, int64_t, int64_t, int64_t, To*, int64_t);
  const uint8_t* at;
  int64_t ld;
  Decode<T> decode;
  Decode<float> decode_wide;
  bool transposed;
  int64_t start = 0;  // the first value of a row

  QuantizedRows(int64_t format, const void* data, int64_t I)
      : at(static_cast<const uint8_t*>(data)), transposed(false) {
    with_format(format, [&]<typename Format>(Format) {
      ld = I / Format::VALUES * Format::BYTES;
      decode = decode_rows<Format, T>;
      decode_wide = decode_rows<Format, float>;
    });
  }

  QuantizedRows turned() const {
    QuantizedRows other = *this;
    other.transposed = !transposed;
    return other;
  }

  QuantizedRows from(int64_t row, int64_t column) const {
    QuantizedRows rest = *this;
    rest.at += (transposed ? column : row) * ld;
    rest.start += transposed ? row : column;
    return rest;
  }
};

// Widens squares of W that stay in the L1 cache, and packs those.
template <typename T>
void pack_columns(const QuantizedRows<T>& b, int64_t columns, int64_t terms, T* to) {
  constexpr int64_t SQUARE = 64;
  static_assert(COLUMNS <= SQUARE && TERMS % SQUARE == 0);
  alignas(64) T values[SQUARE * SQUARE];
  for (int64_t k = 0; k < terms; k += SQUARE) {
    const int64_t depth = std::min(SQUARE, terms - k);
    const QuantizedRows<T> rest = b.from(k, 0);
    rest.decode(rest.at, b.ld, b.transposed ? columns : depth, rest.start, b.transposed ? depth : columns, values, SQUARE);
    for (int64_t start = 0; start < columns; start += PANEL<T>) {
      const int64_t width = std::min(PANEL<T>, columns - start);
      const Operand<T> square{values, SQUARE, b.transposed};
      pack_panel(square.from(0, start), width, depth, to + start * padded<T>(terms) + k * width);
    }
  }
}

constexpr int64_t FEW_ROWS = 16;  // products of fewer rows read W once instead of packing it

// Computes parts of rows of C = A W^T for M < FEW_ROWS rows of A.
template <typename T, typename Finish>
void multiply_few_rows(int64_t M, int64_t O, int64_t I, const T* a, const QuantizedRows<T>& w, const Finish& finish) {
  constexpr int64_t OUTPUTS = 16, TERMS_AT_ONCE = 1024;
  Buffer<float> wide(M * I);
  for (int64_t i = 0; i < M * I; ++i) wide[i] = load(a + i);
  parallel_each(divide_up(O, OUTPUTS), [&](int64_t unit) {
    float sums[FEW_ROWS][OUTPUTS], values[TERMS_AT_ONCE];
    const int64_t column = unit * OUTPUTS, columns = std::min(OUTPUTS, O - column);
    for (int64_t j = 0; j < columns; ++j) {
      float lanes[FEW_ROWS][GROUP] = {};
      for (int64_t k = 0; k < I; k += TERMS_AT_ONCE) {
        const int64_t terms = std::min(TERMS_AT_ONCE, I - k);
        w.decode_wide(w.at + (column + j) * w.ld, w.ld, 1, k, terms, values, 0);
        for (int64_t row = 0; row < M; ++row)
          for (int64_t term = 0; term < terms; term += GROUP)
            for (int64_t i = 0; i < GROUP; ++i) lanes[row][i] += wide[row * I + k + term + i] * values[term + i];
      }
      for (int64_t row = 0; row < M; ++row) sums[row][j] = sum_of(GROUP, [&](int64_t i) { return lanes[row][i]; });
    }
    for (int64_t row = 0; row < M; ++row) finish(row, column, columns, sums[row]);
  });
}

template <typename T, typename Finish>
void multiply_rows(int64_t M, int64_t N, int64_t K, const T* a, const QuantizedRows<T>& b, const Finish& finish) {
  if (b.transposed && M < FEW_ROWS)
    multiply_few_rows(M, N, K, a, b, finish);
  else
    Multiplication<T, Finish, QuantizedRows<T>>({M, N, K, {a, K, false}, b}, finish).run();
}

}  // namespace sansgpu
