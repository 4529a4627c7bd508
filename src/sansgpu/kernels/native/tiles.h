// Code shared by the kernels: packing, reductions, dropout and a vectorizable exp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../native.h"

namespace sansgpu {

// A bf16 value, i.e. the upper half of an fp32 value.
struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit constexpr bf16(uint16_t bits) : bits(bits) {}
};

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
constexpr int64_t divide_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit; }

// Uninitialized memory, aligned to a cache line. A std::vector would zero it, which takes as long as using it.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<T*>(::operator new(size * sizeof(T), ALIGNMENT))) {}
  operator T*() const { return data_.get(); }

 private:
  static constexpr std::align_val_t ALIGNMENT{64};
  struct Free {
    void operator()(T* data) const { ::operator delete(data, ALIGNMENT); }
  };
  std::unique_ptr<T, Free> data_;
};

// Rounds to bf16 (to nearest, ties to even) with integer arithmetic, which compilers vectorize. NaN remains NaN, because
// its bits are not rounded: some would overflow to 0, and others become infinity.
inline uint16_t round_bf16(float x) {
  constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, QUIET = 0x00400000;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return static_cast<uint16_t>(((bits & MAGNITUDE) > INFINITE ? bits | QUIET : rounded) >> 16);
}

inline float widen(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void store(bf16* to, float x) { reinterpret_cast<uint16_t*>(to)[0] = round_bf16(x); }
inline void store(float* to, float x) { *to = x; }
inline float load(const bf16* from) { return widen(reinterpret_cast<const uint16_t*>(from)[0]); }
inline float load(const float* from) { return *from; }

inline void store_row(bf16* to, const float* from, int64_t count) {
  int64_t i = 0;
#ifdef __AVX512BF16__  // compilers do not generate this instruction from `round_bf16`
  for (; i + 32 <= count; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    std::memcpy(static_cast<void*>(to + i), &both, sizeof(both));
  }
#endif
  for (; i < count; ++i) store(to + i, from[i]);
}
inline void store_row(float* to, const float* from, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }

// These return the sum and the maximum of term(0) to term(count - 1). Lanes are explicit, because compilers would keep
// the accumulators of a vectorized reduction in memory.
constexpr int64_t LANES = 32;

template <typename F>
inline float sum_of(int64_t count, F term) {
  float lanes[LANES] = {}, sum = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += term(i + lane);
  for (; i < count; ++i) sum += term(i);
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <typename F>
inline float max_of(int64_t count, F term) {
  float lanes[LANES], most = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  std::fill_n(lanes, LANES, most);
  for (; i + LANES <= count; i += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float x = term(i + lane);
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
    }
  for (; i < count; ++i) most = std::max(most, term(i));
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane)
      lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
  return std::max(most, lanes[0]);
}

constexpr float LOG2E = 1.4426950408889634f;  // exp(x) is 2^(x * LOG2E)

// Computes 2^x for x <= 0 (or slightly above 0, because of rounding) with a relative error of 2e-7. The result is 0
// below -126.5. Uses Cephes' polynomial for the fraction and adds the integer part to the exponent bits.
inline float exp2_nonpositive(float x) {
  x = x < -127.0f ? -127.0f : x;
  const int32_t whole = static_cast<int32_t>(x - 0.5f);  // rounds to nearest, because the conversion truncates
  const float f = x - static_cast<float>(whole);
  float y = 1.535336188319500e-4f;
  y = y * f + 1.339887440266574e-3f;
  y = y * f + 9.618437357674640e-3f;
  y = y * f + 5.550332471162809e-2f;
  y = y * f + 2.402264791363012e-1f;
  y = y * f + 6.931472028550421e-1f;
  y = y * f + 1.0f;
  const uint32_t exponent = static_cast<uint32_t>(whole + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, 4);
  return y * scale;
}

// Decides which values to drop by a hash of seed, row and position, so that the forward and the backward pass drop the
// same ones.
struct Dropout {
  static constexpr int64_t BLOCK = 1 << 15;  // values per row in element-wise dropout
  uint32_t seed, threshold;  // values whose hash is below the threshold are dropped
  float scale;               // factor of the values that are kept
  Dropout(double p, int64_t seed)
      : seed(static_cast<uint32_t>(seed)),
        threshold(p < 1.0 ? static_cast<uint32_t>(p * 4294967296.0) : 0xFFFFFFFFu),
        scale(p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f) {}
  static uint32_t mix(uint32_t x) {  // the finalizer of MurmurHash3
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
  }
  uint32_t row(int64_t head, int64_t query) const {
    return mix(mix(seed + static_cast<uint32_t>(head)) + static_cast<uint32_t>(query));
  }
  float factor(uint32_t row, int64_t place) const {
    return mix(row ^ static_cast<uint32_t>(place) * 0x9E3779B1u) < threshold ? 0.0f : scale;
  }
};

// Packs the right operand B of `product` from a row-major (rows, columns) matrix. bf16 is stored in pairs of rows,
// [rows / 2][columns][2]. Rows from `rows` up to `padded` (even) are zero.
inline void pack(const bf16* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, bf16* to) {
  auto out = reinterpret_cast<uint32_t*>(to);
  for (int64_t row = 0; row < padded; row += 2, out += columns) {
    auto first = reinterpret_cast<const uint16_t*>(from + row * ld);
    if (row + 1 < rows)
      for (int64_t c = 0; c < columns; ++c) out[c] = first[c] | static_cast<uint32_t>(first[ld + c]) << 16;
    else
      for (int64_t c = 0; c < columns; ++c) out[c] = row < rows ? first[c] : 0;
  }
}

inline void pack(const float* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, float* to) {
  for (int64_t row = 0; row < padded; ++row)
    for (int64_t c = 0; c < columns; ++c) to[row * columns + c] = row < rows ? from[row * ld + c] : 0.0f;
}

// Reinterprets bf16 values as integers, whose copies compilers vectorize.
inline uint16_t* bits(bf16* x) { return reinterpret_cast<uint16_t*>(x); }
inline const uint16_t* bits(const bf16* x) { return reinterpret_cast<const uint16_t*>(x); }
inline float* bits(float* x) { return x; }
inline const float* bits(const float* x) { return x; }

// Side of the square blocks that `transpose` holds in registers. Without AVX-512, shuffles work on 16 bytes.
template <typename Word>
#ifdef __AVX512F__
constexpr int64_t SIDE = 16;
#else
constexpr int64_t SIDE = 16 / sizeof(Word);
#endif

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
// Interleaves the words of two rows, from word START on.
template <int64_t START, typename Row, int64_t... I>
inline Row interleaved(const Row& a, const Row& b, std::integer_sequence<int64_t, I...>) {
  return __builtin_shufflevector(a, b, (START + I / 2 + I % 2 * sizeof...(I))...);
}
#endif

template <typename Word>
inline void transpose_square(const Word* from, int64_t ld_from, Word* to, int64_t ld_to) {
  constexpr int64_t N = SIDE<Word>;
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  // Each pass is a perfect shuffle of all words, which rotates the bits of their index (row, column) left by one.
  typedef Word Row __attribute__((vector_size(N * sizeof(Word))));
  constexpr std::make_integer_sequence<int64_t, N> PLACES;
  Row a[N], b[N];
  for (int64_t r = 0; r < N; ++r) std::memcpy(a + r, from + r * ld_from, sizeof(Row));
  for (int64_t turn = 1; turn < N; turn *= 2) {
    for (int64_t r = 0; r < N / 2; ++r) {
      b[2 * r] = interleaved<0>(a[r], a[r + N / 2], PLACES);
      b[2 * r + 1] = interleaved<N / 2>(a[r], a[r + N / 2], PLACES);
    }
    std::swap(a, b);
  }
  for (int64_t c = 0; c < N; ++c) std::memcpy(to + c * ld_to, a + c, sizeof(Row));
#else
  for (int64_t c = 0; c < N; ++c)
    for (int64_t r = 0; r < N; ++r) to[c * ld_to + r] = from[r * ld_from + c];
#endif
}

template <typename Word>
inline void transpose(const Word* from, int64_t ld_from, int64_t rows, int64_t columns, Word* to, int64_t ld_to) {
  constexpr int64_t N = SIDE<Word>;
  for (int64_t row = 0; row < rows; row += N)
    for (int64_t column = 0; column < columns; column += N) {
      if (row + N <= rows && column + N <= columns) {
        transpose_square(from + row * ld_from + column, ld_from, to + column * ld_to + row, ld_to);
      } else {
        for (int64_t r = row; r < std::min(row + N, rows); ++r)
          for (int64_t c = column; c < std::min(column + N, columns); ++c)
            std::memcpy(to + c * ld_to + r, from + r * ld_from + c, sizeof(Word));  // bf16 pairs may be misaligned
      }
    }
}

// Packs B (columns, padded), the transpose of a row-major (rows, columns) matrix. `columns` must be even.
inline void pack_transposed(const bf16* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, bf16* to) {
  auto out = reinterpret_cast<uint32_t*>(to);
  transpose(reinterpret_cast<const uint32_t*>(from), ld / 2, rows, columns / 2, out, padded);
  for (int64_t pair = 0; pair < columns / 2; ++pair) std::fill(out + pair * padded + rows, out + (pair + 1) * padded, 0);
}

inline void pack_transposed(const float* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, float* to) {
  transpose(from, ld, rows, columns, to, padded);
  for (int64_t c = 0; c < columns; ++c) std::fill(to + c * padded + rows, to + (c + 1) * padded, 0.0f);
}

}  // namespace sansgpu
