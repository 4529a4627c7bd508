// Products with a matrix that stays quantized: a right operand of Multiplication, and a product for few rows.
#pragma once

#include "block_formats.h"
#include "matmul.h"
#include "product_vectors.h"

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

// Computes the sums of the products of ROWS rows of A (., I) and a row of W, which it reads once.
template <typename Format, int64_t ROWS>
void multiply_row(const float* a, int64_t I, const uint8_t* w, float* sums, int64_t ld) {
  Floats lanes[ROWS][2] = {};
  for (int64_t k = 0; k < I; k += Format::VALUES, w += Format::BYTES)
    for (int64_t group = 0; group < Format::VALUES / GROUP; ++group, a += GROUP) {
      float values[GROUP];
      Format::decode(w, group, values);
      unrolled<GROUP / WIDTH>([&](auto j) {
        const Floats own = load_as<Floats>(values + j * WIDTH);
        unrolled<ROWS>([&](auto row) { lanes[row][j % 2] += load_as<Floats>(a + row * I + j * WIDTH) * own; });
      });
    }
  for (int64_t row = 0; row < ROWS; ++row) {
    const Floats both = lanes[row][0] + lanes[row][1];
    sums[row * ld] = sum_of(WIDTH, [&](int64_t i) { return both[i]; });
  }
}

constexpr int64_t ROWS_AT_ONCE = 4;

// A quantized matrix W (O, I), or its transpose, without its first rows and columns. `ld` is the bytes of a row.
template <typename T>
struct QuantizedRows {
  using Decode = void (*)(const uint8_t*, int64_t, int64_t, int64_t, int64_t, T*, int64_t);
  using Multiply = void (*)(const float*, int64_t, const uint8_t*, float*, int64_t);
  const uint8_t* at;
  int64_t ld;
  Decode decode;
  const Multiply* multiply;  // multiply_row for 1 ... ROWS_AT_ONCE rows
  bool transposed;
  int64_t start = 0;  // the first value of a row

  QuantizedRows(int64_t format, const void* data, int64_t I)
      : at(static_cast<const uint8_t*>(data)), transposed(false) {
    with_format(format, [&]<typename Format>(Format) {
      ld = I / Format::VALUES * Format::BYTES;
      decode = decode_rows<Format, T>;
      static constexpr Multiply EACH[ROWS_AT_ONCE] = {multiply_row<Format, 1>, multiply_row<Format, 2>,
                                                      multiply_row<Format, 3>, multiply_row<Format, 4>};
      multiply = EACH;
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
  constexpr int64_t OUTPUTS = 16;
  Buffer<float> wide(M * I);
  for (int64_t i = 0; i < M * I; ++i) wide[i] = load(a + i);
  parallel_each(divide_up(O, OUTPUTS), [&](int64_t unit) {
    const int64_t column = unit * OUTPUTS, columns = std::min(OUTPUTS, O - column);
    float sums[FEW_ROWS * OUTPUTS];
    for (int64_t row = 0; row < M; row += ROWS_AT_ONCE) {
      const auto multiply = w.multiply[std::min(ROWS_AT_ONCE, M - row) - 1];
      for (int64_t j = 0; j < columns; ++j)
        multiply(wide + row * I, I, w.at + (column + j) * w.ld, sums + row * OUTPUTS + j, OUTPUTS);
    }
    for (int64_t row = 0; row < M; ++row) finish(row, column, columns, sums + row * OUTPUTS);
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
