// Matmuls that dequantize a matrix on the fly: a right operand for Multiplication, and a separate matmul for few rows.
#pragma once

#include <iterator>

#include "block_formats.h"
#include "matmul.h"
#include "product_vectors.h"

namespace sansgpu {

static_assert(GROUP % WIDTH == 0, "a group has whole vectors");

// Dequantizes `count` values of consecutive rows, from value `start` on. Both must be multiples of GROUP.
template <typename Format, typename T>
void decode_rows(const uint8_t* from, int64_t ld, int64_t rows, int64_t start, int64_t count, T* to, int64_t ld_to) {
  for (int64_t row = 0; row < rows; ++row, from += ld, to += ld_to)
    for (int64_t i = 0; i < count; i += GROUP) {
      float values[GROUP];
      Format::decode(from + (start + i) / Format::VALUES * Format::BYTES, (start + i) % Format::VALUES / GROUP, values);
      store_row(to + i, values, GROUP);
    }
}

// Computes the dot products of ROWS rows of A (., I) with a row of W, which is dequantized once.
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

// A submatrix of a quantized matrix W (O, I) or of its transpose. `ld` is the bytes of a row.
template <typename T>
struct QuantizedRows {
  using Value = T;
  using Decode = void (*)(const uint8_t*, int64_t, int64_t, int64_t, int64_t, T*, int64_t);
  using Multiply = void (*)(const float*, int64_t, const uint8_t*, float*, int64_t);
  const uint8_t* at;
  int64_t ld;
  Decode decode;
  const Multiply* multiply;  // multiply_row for 1 to ROWS_AT_ONCE rows
  bool transposed;
  int64_t values, bytes;  // per block
  int64_t start = 0;      // index of the first value in each row

  QuantizedRows(int64_t format, const void* data, int64_t I)
      : at(static_cast<const uint8_t*>(data)), transposed(false) {
    with_format(format, [&]<typename Format>(Format) {
      values = Format::VALUES;
      bytes = Format::BYTES;
      ld = I / values * bytes;
      decode = decode_rows<Format, T>;
      static constexpr Multiply EACH[] = {multiply_row<Format, 1>, multiply_row<Format, 2>, multiply_row<Format, 3>,
                                          multiply_row<Format, 4>};
      static_assert(std::size(EACH) == ROWS_AT_ONCE);
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

  // Prefetches the blocks of rows that will be dequantized next, because hardware prefetching does not look that far
  // ahead.
  void prefetch(int64_t row, int64_t rows, int64_t first, int64_t count) const {
    const uint8_t* from = at + row * ld + (start + first) / values * bytes;
    for (int64_t i = 0; i < rows; ++i, from += ld)
      for (int64_t byte = 0; byte < divide_up(count, values) * bytes; byte += 64) __builtin_prefetch(from + byte);
  }
};

// Packs columns of W^T, i.e. rows of W. Dequantizes a few rows at a time, so that they stay in cache and prefetching
// keeps up.
template <typename T>
void pack_rows_as_columns(const QuantizedRows<T>& b, int64_t columns, int64_t terms, T* to) {
  constexpr int64_t ROWS = 16, VALUES = 64, PAIR = 4 / sizeof(T);
  static_assert(PANEL<T> % ROWS == 0 && TERMS % VALUES == 0);
  alignas(64) T values[ROWS * VALUES];
  const auto words = [](T* at) { return reinterpret_cast<uint32_t*>(at); };
  for (int64_t start = 0; start < columns; start += ROWS) {
    const int64_t panel = start / PANEL<T> * PANEL<T>, width = std::min(PANEL<T>, columns - panel);
    const int64_t rows = std::min(ROWS, columns - start);
    uint32_t* place = words(to + panel * terms) + start - panel;
    for (int64_t k = 0; k < terms; k += VALUES) {
      const int64_t count = std::min(VALUES, terms - k);
      b.prefetch(start, rows, k + count, std::min(VALUES, terms - k - count));
      b.decode(b.at + start * b.ld, b.ld, rows, b.start + k, count, values, VALUES);
      transpose(words(values), VALUES / PAIR, rows, count / PAIR, place + k / PAIR * width, width);
    }
  }
}

// Packs columns of W. Dequantizes squares that stay in the L1 cache.
template <typename T>
void pack_columns_of_rows(const QuantizedRows<T>& b, int64_t columns, int64_t terms, T* to) {
  constexpr int64_t SQUARE = COLUMNS;
  static_assert(SQUARE % GROUP == 0 && TERMS % SQUARE == 0);
  alignas(64) T values[SQUARE * SQUARE];
  for (int64_t k = 0; k < terms; k += SQUARE) {
    const int64_t rows = std::min(SQUARE, terms - k);
    b.prefetch(k + rows, std::min(SQUARE, terms - k - rows), 0, columns);
    b.decode(b.at + k * b.ld, b.ld, rows, b.start, columns, values, SQUARE);
    for (int64_t start = 0; start < columns; start += PANEL<T>) {
      const int64_t width = std::min(PANEL<T>, columns - start);
      pack(values + start, SQUARE, rows, padded<T>(rows), width, to + start * padded<T>(terms) + k * width);
    }
  }
}

template <typename T>
void pack_columns(const QuantizedRows<T>& b, int64_t columns, int64_t terms, T* to) {
  b.transposed ? pack_rows_as_columns(b, columns, terms, to) : pack_columns_of_rows(b, columns, terms, to);
}

// Dequantizes a block of terms at a time, and converts it.
template <BlockFloat P>
void pack_columns(const QuantizedRows<float>& b, int64_t columns, int64_t terms, P* to) {
  static_assert(BLOCK_TERMS<P> % GROUP == 0 && TERMS % BLOCK_TERMS<P> == 0, "a block has whole groups");
  Buffer<float> values(COLUMNS * BLOCK_TERMS<P>);
  const int64_t ld = b.transposed ? BLOCK_TERMS<P> : COLUMNS;
  each_block<P>(terms, [&](int64_t k, int64_t count, int64_t place) {
    if (b.transposed)
      b.decode(b.at, b.ld, columns, b.start + k, count, values, ld);
    else
      b.decode(b.at + k * b.ld, b.ld, count, b.start, columns, values, ld);
    pack_block(Operand<float>{values, ld, b.transposed}, columns, count, to + place * PANEL<P>, padded<P>(terms));
  });
}

constexpr int64_t FEW_ROWS = 16;  // matmuls with fewer rows read W once instead of packing it

// Computes parts of rows of C = A W^T for M < FEW_ROWS rows of A.
template <typename T, typename V, typename Finish>
void multiply_few_rows(int64_t M, int64_t O, int64_t I, const T* a, const QuantizedRows<V>& w, const Finish& finish) {
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

// The type to which blocks are dequantized before operands are packed as type P. T is the dtype of the other operand.
template <typename T, typename P>
using Dequantized = std::conditional_t<BlockFloat<P>, float, T>;

template <typename P, typename T, typename V, typename Finish>
void multiply_rows(int64_t M, int64_t N, int64_t K, const T* a, const QuantizedRows<V>& b, const Finish& finish) {
  if (b.transposed && M < FEW_ROWS)
    multiply_few_rows(M, N, K, a, b, finish);
  else
    Multiplication<T, Finish, QuantizedRows<V>, P>({M, N, K, {a, K, false}, b}, finish).run();
}

// Calls compute(W) with a matrix W whose rows have I values, in a block format, whose values become type V, or, if
// NOT_QUANTIZED, of type T.
template <typename T, typename V = T, typename F>
void with_matrix(int64_t format, const void* matrix, int64_t I, const F& compute) {
  format == NOT_QUANTIZED ? compute(Operand<T>{static_cast<const T*>(matrix), I, false})
             : compute(QuantizedRows<V>(format, matrix, I));
}

}  // namespace sansgpu
