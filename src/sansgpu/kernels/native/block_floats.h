// Block floating point: operands of matmuls as integers that share scales, packed from fp32.
//
// A block is BLOCK_TERMS consecutive terms of a row of A or of a column of B. Its values are mantissas of 12 bits times
// a power of two, so that the 32-bit sum of a block's products is exact. In packed matrices the scale of a block stands
// before its first mantissa, in the place of two. Drumond et al. (2018), arXiv 1804.01526, train with such operands as
// with fp32.
#pragma once

#include "operand.h"

namespace sansgpu {

constexpr int64_t BLOCK_TERMS = 512, LARGEST_MANTISSA = 2047;
constexpr int64_t SCALE_PLACES = sizeof(float) / sizeof(bfp16);
// Dithering may round the largest mantissa of one of the operands up.
static_assert(BLOCK_TERMS * LARGEST_MANTISSA * (LARGEST_MANTISSA + 1) <= std::numeric_limits<int32_t>::max());
static_assert(BLOCK_TERMS % 2 == 0, "a pair of mantissas is in one block");

template <>
constexpr int64_t padded<bfp16>(int64_t terms) {
  return round_up(terms, 2) + SCALE_PLACES * divide_up(terms, BLOCK_TERMS);
}

// A matrix of packed rows. A submatrix that is read as its transpose must not cross a block of columns.
template <>
inline Operand<bfp16> Operand<bfp16>::from(int64_t row, int64_t column) const {
  const auto place = [&](int64_t down, int64_t across) {
    return down * ld + across + SCALE_PLACES * (across / BLOCK_TERMS);
  };
  return {at + (transposed ? place(column, row) : place(row, column)), ld, transposed};
}

inline int32_t magnitude_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7FFFFFFF;
}

// The scale of a block, and the factor that turns its values into mantissas.
struct BlockScale {
  float scale, inverse;

  // Takes the bits of the block's largest magnitude. With infinity or NaN, the scale is NaN, so that all sums are.
  // Blocks below 2^-70 become zero.
  explicit BlockScale(int32_t largest) {
    constexpr int32_t LEAST = 127 - 60, FRACTION = 10;  // mantissas are below 2^(FRACTION + 1)
    static_assert(LARGEST_MANTISSA == (2 << FRACTION) - 1, "sums of a block fit if mantissas do");
    constexpr float ROUNDED_UP = 1.0f + 0x1p-11f;  // the largest value must not round up to another bit
    float value;
    std::memcpy(&value, &largest, 4);
    const int32_t exponent = std::max(magnitude_bits(value * ROUNDED_UP) >> 23, LEAST);
    scale = exponent == 255 ? std::numeric_limits<float>::quiet_NaN() : power_of_two(exponent - FRACTION);
    inverse = exponent == 255 ? 0.0f : power_of_two(254 - exponent + FRACTION);
  }

 private:
  static float power_of_two(int32_t biased) {
    const int32_t bits = biased << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

// Returns the integer nearest to x in the lowest 16 bits: the sum has it in its last bits, because its unit is 1.
inline uint32_t rounded_bits(float x) {
  const float sum = x + 0x1.8p23f;
  uint32_t bits;
  std::memcpy(&bits, &sum, 4);
  return bits;
}

inline int32_t largest_magnitude_bits(const float* from, int64_t count) {
  int32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, magnitude_bits(from[k]));
  return largest;
}

// Converts a block of a row, `terms` contiguous values, to mantissas in pairs. Returns its scale.
inline float convert_row(const float* from, int64_t terms, bfp16* mantissas) {
  const auto to = reinterpret_cast<uint16_t*>(mantissas);
  const BlockScale block(largest_magnitude_bits(from, terms));
  for (int64_t k = 0; k < terms; ++k) to[k] = static_cast<uint16_t>(rounded_bits(from[k] * block.inverse));
  if (terms % 2) to[terms] = 0;
  return block.scale;
}

// The columns of a row-major matrix that are converted together, at most MOST.
class ColumnBlock {
 public:
  static constexpr int64_t MOST = 64;

  // Finds the scales of a block with `terms` rows.
  ColumnBlock(const float* from, int64_t ld, int64_t terms, int64_t columns)
      : from_(from), ld_(ld), terms_(terms) {
    int32_t largest[MOST] = {};
    for (int64_t k = 0; k < terms; ++k)
      for (int64_t j = 0; j < columns; ++j) largest[j] = std::max(largest[j], magnitude_bits(from[k * ld + j]));
    for (int64_t j = 0; j < columns; ++j) {
      const BlockScale block(largest[j]);
      scales_[j] = block.scale;
      inverses_[j] = block.inverse;
    }
  }

  const float* scales() const { return scales_; }

  // Converts the columns [start, start + count) of the rows k and k + 1 to pairs.
  void convert(int64_t k, int64_t start, int64_t count, uint32_t* to) const {
    const float *first = from_ + k * ld_ + start, *inverses = inverses_ + start;
    if (k + 1 < terms_)
      for (int64_t j = 0; j < count; ++j)
        to[j] = (rounded_bits(first[j] * inverses[j]) & 0xFFFF) | rounded_bits(first[ld_ + j] * inverses[j]) << 16;
    else
      for (int64_t j = 0; j < count; ++j) to[j] = rounded_bits(first[j] * inverses[j]) & 0xFFFF;
  }

 private:
  const float* from_;
  const int64_t ld_, terms_;
  float scales_[MOST], inverses_[MOST];
};

// Calls run(first term, terms, place) for each block, where `place` is the index of its scale in a packed row.
template <typename F>
void each_block(int64_t terms, const F& run) {
  for (int64_t k = 0, place = 0; k < terms; k += BLOCK_TERMS, place += BLOCK_TERMS + SCALE_PLACES)
    run(k, std::min(BLOCK_TERMS, terms - k), place);
}

// Packs `terms` terms of at most ColumnBlock::MOST rows of A, from A^T. `convert(k, pairs)` stores the pairs of all rows
// with the terms k and k + 1. The distance of rows in `to` is ld.
template <typename F>
void pack_pairs(int64_t rows, int64_t terms, bfp16* to, int64_t ld, const F& convert) {
  constexpr int64_t PAIRS = 32;  // transposed at once
  alignas(64) uint32_t pairs[PAIRS * ColumnBlock::MOST];
  for (int64_t done = 0; done < divide_up(terms, 2); done += PAIRS) {
    const int64_t some = std::min(PAIRS, divide_up(terms, 2) - done);
    for (int64_t i = 0; i < some; ++i) convert(2 * (done + i), pairs + i * ColumnBlock::MOST);
    transpose(pairs, ColumnBlock::MOST, some, rows, reinterpret_cast<uint32_t*>(to) + done, ld / 2);
  }
}

// Packs rows of A, whose distance in `to` is ld.
inline void pack_rows(const Operand<float>& a, int64_t rows, int64_t terms, bfp16* to, int64_t ld) {
  each_block(terms, [&](int64_t k, int64_t count, int64_t place) {
    if (!a.transposed) {
      for (int64_t row = 0; row < rows; ++row) {
        bfp16* block = to + row * ld + place;
        const float scale = convert_row(a.at + row * a.ld + k, count, block + SCALE_PLACES);
        std::memcpy(block, &scale, sizeof(scale));
      }
      return;
    }
    for (int64_t row = 0; row < rows; row += ColumnBlock::MOST) {
      const int64_t width = std::min(ColumnBlock::MOST, rows - row);
      const ColumnBlock columns(a.at + k * a.ld + row, a.ld, count, width);
      bfp16* block = to + row * ld + place;
      for (int64_t i = 0; i < width; ++i) std::memcpy(block + i * ld, columns.scales() + i, sizeof(float));
      pack_pairs(width, count, block + SCALE_PLACES, ld,
                 [&](int64_t pair, uint32_t* pairs) { columns.convert(pair, 0, width, pairs); });
    }
  });
}

// Packs rows of the transpose of packed rows. Leaves out the scales of those: they must be factors of the columns of
// the other operand.
inline void pack_rows(const Operand<bfp16>& a, int64_t rows, int64_t terms, bfp16* to, int64_t ld) {
  constexpr float ONE = 1.0f;
  each_block(terms, [&](int64_t k, int64_t count, int64_t place) {
    for (int64_t row = 0; row < rows; row += ColumnBlock::MOST) {
      const int64_t width = std::min(ColumnBlock::MOST, rows - row);
      const auto from = reinterpret_cast<const uint16_t*>(a.at + k * a.ld + SCALE_PLACES + row);
      bfp16* block = to + row * ld + place;
      for (int64_t i = 0; i < width; ++i) std::memcpy(block + i * ld, &ONE, sizeof(ONE));
      pack_pairs(width, count, block + SCALE_PLACES, ld, [&](int64_t term, uint32_t* pairs) {
        const uint16_t *first = from + term * a.ld, *second = first + a.ld;
        if (term + 1 < count)
          for (int64_t i = 0; i < width; ++i) pairs[i] = first[i] | uint32_t{second[i]} << 16;
        else
          std::copy_n(first, width, pairs);
      });
    }
  });
}

// Packs a block of columns of B with `terms` terms into whole panels, whose distance in `to` is `ld` per column. The
// columns beyond the last one are zero.
inline void pack_block(const Operand<float>& b, int64_t columns, int64_t terms, bfp16* to, int64_t ld) {
  constexpr int64_t WIDTH = PANEL<bfp16>;
  const int64_t pairs = divide_up(terms, 2);
  const auto panel_of = [&](int64_t column) { return reinterpret_cast<uint32_t*>(to + column * ld); };
  if (columns % WIDTH) std::fill_n(panel_of(columns / WIDTH * WIDTH), (pairs + 1) * WIDTH, 0u);
  if (b.transposed) {
    alignas(64) uint32_t rows[WIDTH * BLOCK_TERMS / 2];
    for (int64_t start = 0; start < columns; start += WIDTH) {
      uint32_t* panel = panel_of(start);
      const int64_t width = std::min(WIDTH, columns - start);
      for (int64_t j = 0; j < width; ++j) {
        const auto row = reinterpret_cast<bfp16*>(rows + j * pairs);
        const float scale = convert_row(b.at + (start + j) * b.ld, terms, row);
        std::memcpy(panel + j, &scale, sizeof(scale));
      }
      transpose(rows, pairs, width, pairs, panel + WIDTH, WIDTH);
    }
    return;
  }
  for (int64_t group = 0; group < columns; group += ColumnBlock::MOST) {
    const int64_t together = std::min(ColumnBlock::MOST, columns - group);
    const ColumnBlock block(b.at + group, b.ld, terms, together);
    for (int64_t start = 0; start < together; start += WIDTH) {
      uint32_t* panel = panel_of(group + start);
      const int64_t width = std::min(WIDTH, together - start);
      std::memcpy(panel, block.scales() + start, width * sizeof(float));
      for (int64_t pair = 0; pair < pairs; ++pair) block.convert(2 * pair, start, width, panel + (1 + pair) * WIDTH);
    }
  }
}

inline void pack_columns(const Operand<float>& b, int64_t columns, int64_t terms, bfp16* to) {
  each_block(terms, [&](int64_t k, int64_t count, int64_t place) {
    pack_block(b.from(k, 0), columns, count, to + place * PANEL<bfp16>, padded<bfp16>(terms));
  });
}

}  // namespace sansgpu
