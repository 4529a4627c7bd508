// What the kernels share: matrix products of tiles that stay in cache, their packing, and vectorisable exp.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

namespace sansgpu {

using bf16 = c10::BFloat16;

// Uninitialised memory on a cache line's boundary. Not a std::vector: zeroing it would cost as much as using it.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)), &std::free) {}
  operator T*() const { return data_.get(); }

 private:
  std::unique_ptr<T, decltype(&std::free)> data_;
};

// C (M, N) fp32 = A (M, K) B (K, N), or += with `add`. B is packed by the functions below.
template <typename T>
inline void product(int64_t M, int64_t N, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, float* C,
                    int64_t ldc, bool add) {
  at::native::cpublas::brgemm(M, N, K, lda, ldb, ldc, add, A, B, C, std::is_same_v<T, bf16>);
}

// Rounds to nearest, ties to even, as integer arithmetic that compilers vectorise; not for NaN.
inline uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
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

// 2^x to 2e-7 relative for x <= 0, and 0 below -126: Cephes' polynomial of the fraction, the rest into the exponent.
inline float exp2_nonpositive(float x) {
  x = x < -126.0f ? -126.0f : x;
  const float whole = std::floor(x + 0.5f), f = x - whole;
  float y = 1.535336188319500e-4f;
  y = y * f + 1.339887440266574e-3f;
  y = y * f + 9.618437357674640e-3f;
  y = y * f + 5.550332471162809e-2f;
  y = y * f + 2.402264791363012e-1f;
  y = y * f + 6.931472028550421e-1f;
  y = y * f + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, 4);
  return x <= -126.0f ? 0.0f : y * scale;
}

// Dropout of a number at a place of a row: a hash of both and the seed, so that both passes drop the same.
struct Dropout {
  uint32_t seed, threshold;  // dropped where the hash is below
  float scale;               // of what is kept
  Dropout(double p, int64_t seed)
      : seed(static_cast<uint32_t>(seed)),
        threshold(static_cast<uint32_t>(p * 4294967296.0)),
        scale(static_cast<float>(1.0 / (1.0 - p))) {}
  static uint32_t mix(uint32_t x) {  // MurmurHash3's finaliser
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

// The right operand of `product`, from a row-major (rows, columns) matrix that is B itself. bf16 goes in pairs of rows,
// [rows / 2][columns][2]; rows up to `padded` (even) are zero.
inline void pack(const bf16* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, bf16* to) {
  auto out = reinterpret_cast<uint32_t*>(to);
  for (int64_t row = 0; row < padded; row += 2) {
    auto first = reinterpret_cast<const uint16_t*>(from + row * ld);
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t low = row < rows ? first[c] : 0, high = row + 1 < rows ? first[ld + c] : 0;
      out[row / 2 * columns + c] = low | high << 16;
    }
  }
}

inline void pack(const float* from, int64_t ld, int64_t rows, int64_t padded, int64_t columns, float* to) {
  for (int64_t row = 0; row < padded; ++row)
    for (int64_t c = 0; c < columns; ++c) to[row * columns + c] = row < rows ? from[row * ld + c] : 0.0f;
}

// The same numbers as plain integers, which compilers move in vectors.
inline uint16_t* bits(bf16* x) { return reinterpret_cast<uint16_t*>(x); }
inline const uint16_t* bits(const bf16* x) { return reinterpret_cast<const uint16_t*>(x); }
inline float* bits(float* x) { return x; }
inline const float* bits(const float* x) { return x; }

// to (columns, ld_to) = the transpose of from (rows, columns), by squares that stay in registers and in L1.
template <typename Word>
inline void transpose(const Word* from, int64_t ld_from, int64_t rows, int64_t columns, Word* to, int64_t ld_to) {
  constexpr int64_t SIDE = 16;
  for (int64_t row = 0; row < rows; row += SIDE)
    for (int64_t column = 0; column < columns; column += SIDE) {
      if (row + SIDE <= rows && column + SIDE <= columns) {
        Word square[SIDE][SIDE];
        for (int64_t r = 0; r < SIDE; ++r)
          for (int64_t c = 0; c < SIDE; ++c) square[c][r] = from[(row + r) * ld_from + column + c];
        for (int64_t c = 0; c < SIDE; ++c) std::memcpy(to + (column + c) * ld_to + row, square[c], sizeof(square[c]));
      } else {
        for (int64_t r = row; r < std::min(row + SIDE, rows); ++r)
          for (int64_t c = column; c < std::min(column + SIDE, columns); ++c) to[c * ld_to + r] = from[r * ld_from + c];
      }
    }
}

// The same for B = the transpose of a row-major (rows, columns) matrix: B is (columns, padded); columns are even.
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
