// Rotation of the terms of matmuls in 8 bits. It spreads an outlier over many terms, so that a block's other values are
// not rounded to zero.
//
// The product of two matrices stays the same if their terms are multiplied by the same orthogonal matrix. Here it is a
// Hadamard matrix for each piece of 256, 64 or 16 terms: it mixes the terms whose distance is a multiple of LINE, and
// each four neighbors. Terms are first multiplied by the signs of a bent function, whose transform is flat, so that a
// constant is spread, too. Ashkboos et al. (2024), arXiv 2404.00456, rotate trained models like this, and Xi et al. (2023), arXiv
// 2306.11987, the operands of training.
#pragma once

#include "product_vectors.h"

namespace sansgpu {

constexpr int64_t LINE = 16;
static_assert(LINE % WIDTH == 0 && WIDTH % 4 == 0, "a line is whole vectors of whole quadruples");

// Returns the sign of a term, which is that of a bent function, x0 x1 + x2 x3 + y0 y1, of the bits of its line's number
// and of its place among four neighbors.
constexpr float sign_of(int64_t line, int64_t place) {
  return ((line & line >> 1) ^ (line >> 2 & line >> 3) ^ (place & place >> 1)) & 1 ? -1.0f : 1.0f;
}

// Multiplies LINES values, each in a register, by a Hadamard matrix.
template <int64_t LINES>
inline void mix(Floats* values) {
  unrolled<LINES == 16 ? 4 : LINES == 4 ? 2 : 0>([&](auto bit) {
    constexpr int64_t DISTANCE = 1 << bit;
    unrolled<LINES>([&](auto i) {
      if constexpr ((i & DISTANCE) == 0) {
        const Floats a = values[i], b = values[i + DISTANCE];
        values[i] = a + b;
        values[i + DISTANCE] = a - b;
      }
    });
  });
}

// Replaces each two values at this DISTANCE by their sum and their difference.
template <int64_t DISTANCE>
inline Floats mix_neighbors(Floats x) {
  return [x]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
    const Floats signs = {(I & DISTANCE ? -1.0f : 1.0f)...};
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    const Floats others = __builtin_shufflevector(x, x, (I ^ DISTANCE)...);
#else
    const Floats others = {x[I ^ DISTANCE]...};
#endif
    return others + x * signs;
  }(std::make_integer_sequence<int64_t, WIDTH>());
}

// Returns the signs of a line, multiplied by the factor with which a piece of LINES lines is orthogonal.
template <int64_t LINES>
inline Floats factors_of(int64_t line) {
  constexpr float FACTOR = LINES == 16 ? 0.125f : LINES == 4 ? 0.25f : 0.5f;
  return [line]<int64_t... I>(std::integer_sequence<int64_t, I...>) {
    return Floats{(FACTOR * sign_of(line, I % 4))...};
  }(std::make_integer_sequence<int64_t, WIDTH>());
}

// Rotates a piece of LINES lines of contiguous terms.
template <int64_t LINES>
[[gnu::flatten]] inline void rotate_terms(float* x) {
  for (int64_t start = 0; start < LINE; start += WIDTH) {
    Floats values[LINES];
    unrolled<LINES>([&](auto i) { values[i] = load_as<Floats>(x + i * LINE + start) * factors_of<LINES>(i); });
    mix<LINES>(values);
    unrolled<LINES>([&](auto i) {
      const Floats mixed = mix_neighbors<2>(mix_neighbors<1>(values[i]));
      std::memcpy(x + i * LINE + start, &mixed, VECTOR_BYTES);
    });
  }
}

// Rotates a piece of LINES lines of rows, each of which has one term of `columns` columns, a multiple of WIDTH.
template <int64_t LINES>
[[gnu::flatten]] inline void rotate_rows(float* x, int64_t ld, int64_t columns) {
  for (int64_t place = 0; place < LINE; ++place)
    for (int64_t j = 0; j < columns; j += WIDTH) {
      Floats values[LINES];
      float* at = x + place * ld + j;
      unrolled<LINES>([&](auto i) {
        values[i] = load_as<Floats>(at + i * LINE * ld) * factors_of<LINES>(i)[place % 4];
      });
      mix<LINES>(values);
      unrolled<LINES>([&](auto i) { std::memcpy(at + i * LINE * ld, &values[i], VECTOR_BYTES); });
    }
  for (int64_t row = 0; row < LINES * LINE; row += 4)
    for (int64_t j = 0; j < columns; j += WIDTH) {
      Floats values[4];
      float* at = x + row * ld + j;
      unrolled<4>([&](auto i) { values[i] = load_as<Floats>(at + i * ld); });
      mix<4>(values);
      unrolled<4>([&](auto i) { std::memcpy(at + i * ld, &values[i], VECTOR_BYTES); });
    }
}

// Calls run(first term, LINES) for each piece of `terms` terms. The last terms, fewer than LINE, are in none.
template <typename F>
inline void each_piece(int64_t terms, const F& run) {
  int64_t k = 0;
  const auto pieces = [&](auto lines) {
    for (; k + lines * LINE <= terms; k += lines * LINE) run(k, lines);
  };
  pieces(std::integral_constant<int64_t, 16>());
  pieces(std::integral_constant<int64_t, 4>());
  pieces(std::integral_constant<int64_t, 1>());
}

// Rotates `terms` contiguous terms.
inline void rotate_row(float* x, int64_t terms) {
  each_piece(terms, [=](int64_t k, auto lines) { rotate_terms<lines>(x + k); });
}

// Rotates the terms of columns, a multiple of WIDTH, in a row-major matrix.
inline void rotate_columns(float* x, int64_t ld, int64_t terms, int64_t columns) {
  each_piece(terms, [=](int64_t k, auto lines) { rotate_rows<lines>(x + k * ld, ld, columns); });
}

}  // namespace sansgpu
