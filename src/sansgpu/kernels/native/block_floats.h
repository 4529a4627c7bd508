// Block floating point: operands of matmuls as integers that share scales, packed from fp32 or bf16.
//
// A block is consecutive terms of a row of A or of a column of B. Its values are integer mantissas times its scale, and
// the 32-bit sum of a block's products is exact. Mantissas are packed in 32-bit words, and each block of a packed row
// or column begins with a header of words, the first of which is its scale.
//
// bfp16 has mantissas of 12 bits and powers of two as scales; Drumond et al. (2018), arXiv 1804.01526, train with such
// operands as with fp32. bfp8 has mantissas of 8 bits, and the terms of its blocks are rotated (rotation.h). Instructions
// of VNNI multiply unsigned by signed bytes, so the mantissas of A are stored plus OFFSET. The second word of a header of
// B subtracts what this adds to the sum.
#pragma once

#include "operand.h"
#include "rotation.h"

namespace sansgpu {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int32_t OFFSET = 128;
#else
constexpr int32_t OFFSET = 0;
#endif

// The format of a block of type P. FLIP is the bits of a word of A that the offset changes.
template <BlockFloat P>
struct BlockFormat;
template <>
struct BlockFormat<bfp16> {
  static constexpr int64_t TERMS = 512, HEADER_WORDS = 1;
  static constexpr int32_t LARGEST = 2047;
  static constexpr uint32_t FLIP = 0;
};
template <>
struct BlockFormat<bfp8> {
  static constexpr int64_t TERMS = 256, HEADER_WORDS = 2;
  static constexpr int32_t LARGEST = 127;
  static constexpr uint32_t FLIP = OFFSET * 0x01010101u;
};

template <BlockFloat P>
constexpr int64_t PER_WORD = 4 / sizeof(P);
template <BlockFloat P>
constexpr int64_t BLOCK_TERMS = BlockFormat<P>::TERMS;
template <BlockFloat P>
constexpr int64_t HEADER_WORDS = BlockFormat<P>::HEADER_WORDS;
template <BlockFloat P>
constexpr bool ROTATES = std::is_same_v<P, bfp8>;
template <BlockFloat P>
constexpr int64_t HEADER_PLACES = HEADER_WORDS<P> * PER_WORD<P>;

// Dithering may round the largest mantissa of one of the operands up.
constexpr int64_t LARGEST_16 = BlockFormat<bfp16>::LARGEST, LARGEST_8 = BlockFormat<bfp8>::LARGEST;
static_assert(BLOCK_TERMS<bfp16> * LARGEST_16 * (LARGEST_16 + 1) <= std::numeric_limits<int32_t>::max());
static_assert(BLOCK_TERMS<bfp8> * LARGEST_8 * (LARGEST_8 + OFFSET) < 1 << 24, "sums are exact in fp32, too");
static_assert(BLOCK_TERMS<bfp16> % PER_WORD<bfp16> == 0 && BLOCK_TERMS<bfp8> % PER_WORD<bfp8> == 0);

template <BlockFloat P>
constexpr int64_t block_places(int64_t terms) {
  return round_up(terms, PER_WORD<P>) + HEADER_PLACES<P> * divide_up(terms, BLOCK_TERMS<P>);
}
template <>
constexpr int64_t padded<bfp16>(int64_t terms) {
  return block_places<bfp16>(terms);
}
template <>
constexpr int64_t padded<bfp8>(int64_t terms) {
  return block_places<bfp8>(terms);
}

// A matrix of packed rows. A submatrix that is read as its transpose must not cross a block of columns.
template <>
inline Operand<bfp16> Operand<bfp16>::from(int64_t row, int64_t column) const {
  const auto place = [&](int64_t down, int64_t across) {
    return down * ld + across + HEADER_PLACES<bfp16> * (across / BLOCK_TERMS<bfp16>);
  };
  return {at + (transposed ? place(column, row) : place(row, column)), ld, transposed};
}

inline int32_t magnitude_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7FFFFFFF;
}

inline float float_of(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The scale of a block, and the factor that turns its values into mantissas. Takes the bits of the block's largest
// magnitude. With infinity or NaN, the scale is NaN, so that all sums are. Blocks below 2^-60 become zero.
template <BlockFloat P>
struct BlockScale {
  float scale, inverse;
  explicit BlockScale(int32_t largest);
};

constexpr int32_t LEAST_EXPONENT = 127 - 60, NO_EXPONENT = 255;

template <>
inline BlockScale<bfp16>::BlockScale(int32_t largest) {
  constexpr int32_t FRACTION = 10;  // mantissas are below 2^(FRACTION + 1)
  static_assert(BlockFormat<bfp16>::LARGEST == (2 << FRACTION) - 1, "sums of a block fit if mantissas do");
  constexpr float ROUNDED_UP = 1.0f + 0x1p-11f;  // the largest value must not round up to another bit
  const int32_t exponent = std::max(magnitude_bits(float_of(largest) * ROUNDED_UP) >> 23, LEAST_EXPONENT);
  const bool is_finite = exponent != NO_EXPONENT;
  scale = is_finite ? float_of((exponent - FRACTION) << 23) : std::numeric_limits<float>::quiet_NaN();
  inverse = is_finite ? float_of((254 - exponent + FRACTION) << 23) : 0.0f;
}

// The scale is rounded up to four significant bits, so that it has an inverse from a table, which is the same on every
// processor, and products of two scales are exact.
template <>
inline BlockScale<bfp8>::BlockScale(int32_t largest) {
  constexpr float INVERSES[] = {1.0f, 8.0f / 9, 8.0f / 10, 8.0f / 11, 8.0f / 12, 8.0f / 13, 8.0f / 14, 8.0f / 15};
  constexpr int32_t BITS = 20;  // a scale has only the first 3 of the 23 bits of an fp32 fraction
  // Every NaN counts as infinity: with its own bits, the sum below could overflow to a scale that is finite.
  const int32_t unit =
      std::min(magnitude_bits(float_of(largest) * (1.0f / BlockFormat<bfp8>::LARGEST)), NO_EXPONENT << 23);
  const int32_t up = std::max(unit + ((1 << BITS) - 1), LEAST_EXPONENT << 23) >> BITS, exponent = up >> 3;
  const bool is_finite = exponent < NO_EXPONENT;
  scale = is_finite ? float_of(up << BITS) : std::numeric_limits<float>::quiet_NaN();
  inverse = is_finite ? INVERSES[up & 7] * float_of((254 - exponent) << 23) : 0.0f;
}

// Returns the integer nearest to x in the lowest 16 bits: the sum has it in its last bits, because its unit is 1.
inline uint32_t rounded_bits(float x) {
  const float sum = x + 0x1.8p23f;
  uint32_t bits;
  std::memcpy(&bits, &sum, 4);
  return bits;
}

template <typename T>
inline int32_t largest_magnitude_bits(const T* from, int64_t count) {
  int32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, magnitude_bits(load(from + k)));
  return largest;
}

// Converts a block of contiguous values, rotated if P is bfp8, to words of mantissas. Returns its scale.
template <BlockFloat P, typename T>
inline float convert_values(const T* from, int64_t terms, P* mantissas) {
  using Bits = std::conditional_t<sizeof(P) == 1, uint8_t, uint16_t>;
  const auto to = reinterpret_cast<Bits*>(mantissas);
  const BlockScale<P> block(largest_magnitude_bits(from, terms));
  for (int64_t k = 0; k < terms; ++k) to[k] = static_cast<Bits>(rounded_bits(load(from + k) * block.inverse));
  for (int64_t k = terms; k < round_up(terms, PER_WORD<P>); ++k) to[k] = 0;
  return block.scale;
}

// Converts a block of a row, `terms` contiguous values, to words of mantissas. Returns its scale.
template <BlockFloat P, typename T>
inline float convert_row(const T* from, int64_t terms, P* mantissas) {
  if constexpr (ROTATES<P>) {
    alignas(64) float rotated[BLOCK_TERMS<P>];
    for (int64_t k = 0; k < terms; ++k) rotated[k] = load(from + k);
    rotate_row(rotated, terms);
    return convert_values(rotated, terms, mantissas);
  } else {
    return convert_values(from, terms, mantissas);
  }
}

constexpr int64_t MOST_COLUMNS = 64;  // converted together

// The columns of a row-major matrix that are converted together, at most MOST_COLUMNS.
template <BlockFloat P, typename T>
class ColumnBlock {
  using Value = std::conditional_t<ROTATES<P>, float, T>;
  static constexpr int64_t ROTATED_LD = MOST_COLUMNS + 16;  // an odd number of cache lines, which avoids conflicts

 public:
  // Finds the scales of a block with `terms` rows.
  ColumnBlock(const T* from, int64_t ld, int64_t terms, int64_t columns) : ld_(ld), terms_(terms) {
    if constexpr (ROTATES<P>)
      rotate(from, ld, columns);
    else
      from_ = from;
    int32_t largest[MOST_COLUMNS] = {};
    for (int64_t k = 0; k < terms; ++k)
      for (int64_t j = 0; j < columns; ++j)
        largest[j] = std::max(largest[j], magnitude_bits(load(from_ + k * ld_ + j)));
    for (int64_t j = 0; j < columns; ++j) {
      const BlockScale<P> block(largest[j]);
      scales_[j] = block.scale;
      inverses_[j] = block.inverse;
    }
  }

  const float* scales() const { return scales_; }

  // Converts the columns [start, start + count) of the rows from k on to one word each.
  void convert(int64_t k, int64_t start, int64_t count, uint32_t* to) const {
    switch (std::min(PER_WORD<P>, terms_ - k)) {
      case 1: return convert_rows<1>(k, start, count, to);
      case 2: return convert_rows<2>(k, start, count, to);
      case 3: return convert_rows<3>(k, start, count, to);
      default: return convert_rows<4>(k, start, count, to);
    }
  }

 private:
  // Copies the columns to `rotated_`, and rotates them.
  void rotate(const T* from, int64_t ld, int64_t columns) {
    const int64_t width = round_up(columns, WIDTH);
    for (int64_t k = 0; k < terms_; ++k) {
      float* to = rotated_ + k * ROTATED_LD;
      for (int64_t j = 0; j < columns; ++j) to[j] = load(from + k * ld + j);
      for (int64_t j = columns; j < width; ++j) to[j] = 0.0f;
    }
    rotate_columns(rotated_, ROTATED_LD, terms_, width);
    from_ = rotated_;
    ld_ = ROTATED_LD;
  }

  template <int64_t ROWS>
  void convert_rows(int64_t k, int64_t start, int64_t count, uint32_t* to) const {
    if constexpr (ROWS <= PER_WORD<P>) {
      constexpr int BITS = 32 / PER_WORD<P>;
      const Value* first = from_ + k * ld_ + start;
      const float* inverses = inverses_ + start;
      for (int64_t j = 0; j < count; ++j) {
        uint32_t word = 0;
        for (int64_t row = 0; row < ROWS; ++row)
          word |= (rounded_bits(load(first + row * ld_ + j) * inverses[j]) & ((1u << BITS) - 1)) << BITS * row;
        to[j] = word;
      }
    }
  }

  const Value* from_;
  int64_t ld_;
  const int64_t terms_;
  float scales_[MOST_COLUMNS], inverses_[MOST_COLUMNS];
  alignas(64) float rotated_[ROTATES<P> ? BLOCK_TERMS<P> * ROTATED_LD : 1];
};

// Calls run(first term, terms, place) for each block, where `place` is the index of its header in a packed row.
template <BlockFloat P, typename F>
void each_block(int64_t terms, const F& run) {
  for (int64_t k = 0, place = 0; k < terms; k += BLOCK_TERMS<P>, place += BLOCK_TERMS<P> + HEADER_PLACES<P>)
    run(k, std::min(BLOCK_TERMS<P>, terms - k), place);
}

// Packs `terms` terms of at most MOST_COLUMNS rows of A, from A^T. `convert(k, words)` stores the words of all rows that
// begin with term k. The distance of rows in `to` is ld.
template <BlockFloat P, typename F>
void pack_words(int64_t rows, int64_t terms, P* to, int64_t ld, const F& convert) {
  constexpr int64_t WORDS = 32;  // transposed at once
  alignas(64) uint32_t words[WORDS * MOST_COLUMNS];
  for (int64_t done = 0, all = divide_up(terms, PER_WORD<P>); done < all; done += WORDS) {
    const int64_t some = std::min(WORDS, all - done);
    for (int64_t i = 0; i < some; ++i) convert(PER_WORD<P> * (done + i), words + i * MOST_COLUMNS);
    transpose(words, MOST_COLUMNS, some, rows, reinterpret_cast<uint32_t*>(to) + done, ld / PER_WORD<P>);
  }
}

// Adds the offset to the mantissas of a block of a row of A.
template <BlockFloat P>
void add_offset(P* mantissas, int64_t terms) {
  const auto words = reinterpret_cast<uint32_t*>(mantissas);
  if constexpr (BlockFormat<P>::FLIP != 0)
    for (int64_t i = 0; i < divide_up(terms, PER_WORD<P>); ++i) words[i] ^= BlockFormat<P>::FLIP;
}

// Packs rows of A, whose distance in `to` is ld.
template <BlockFloat P, typename T>
inline void pack_rows(const Operand<T>& a, int64_t rows, int64_t terms, P* to, int64_t ld) {
  each_block<P>(terms, [&](int64_t k, int64_t count, int64_t place) {
    if (!a.transposed) {
      for (int64_t row = 0; row < rows; ++row) {
        P* block = to + row * ld + place;
        const float scale = convert_row(a.at + row * a.ld + k, count, block + HEADER_PLACES<P>);
        std::memcpy(block, &scale, sizeof(scale));
        add_offset(block + HEADER_PLACES<P>, count);
      }
      return;
    }
    for (int64_t row = 0; row < rows; row += MOST_COLUMNS) {
      const int64_t width = std::min(MOST_COLUMNS, rows - row);
      const ColumnBlock<P, T> columns(a.at + k * a.ld + row, a.ld, count, width);
      P* block = to + row * ld + place;
      for (int64_t i = 0; i < width; ++i) std::memcpy(block + i * ld, columns.scales() + i, sizeof(float));
      pack_words(width, count, block + HEADER_PLACES<P>, ld,
                 [&](int64_t term, uint32_t* words) { columns.convert(term, 0, width, words); });
      for (int64_t i = 0; i < width; ++i) add_offset(block + i * ld + HEADER_PLACES<P>, count);
    }
  });
}

// Packs a row of A whose blocks are rotated.
inline void pack_rotated_row(const float* rotated, int64_t terms, bfp8* to) {
  each_block<bfp8>(terms, [&](int64_t k, int64_t count, int64_t place) {
    bfp8* mantissas = to + place + HEADER_PLACES<bfp8>;
    const float scale = convert_values(rotated + k, count, mantissas);
    std::memcpy(to + place, &scale, sizeof(scale));
    add_offset(mantissas, count);
  });
}

// Subtracts the values of a packed row of A from those that it was packed from, which are rotated.
inline void subtract_row(const bfp8* row, int64_t terms, float* values) {
  each_block<bfp8>(terms, [&](int64_t k, int64_t count, int64_t place) {
    float scale;
    std::memcpy(&scale, row + place, sizeof(scale));
    const auto bytes = reinterpret_cast<const uint8_t*>(row + place + HEADER_PLACES<bfp8>);
    for (int64_t i = 0; i < count; ++i)
      values[k + i] -= scale * static_cast<float>(static_cast<int8_t>(bytes[i] ^ static_cast<uint8_t>(OFFSET)));
  });
}

// Packs rows of the transpose of packed rows. Leaves out the scales of those: they must be factors of the columns of
// the other operand.
inline void pack_rows(const Operand<bfp16>& a, int64_t rows, int64_t terms, bfp16* to, int64_t ld) {
  constexpr float ONE = 1.0f;
  constexpr int64_t HEADER = HEADER_PLACES<bfp16>;
  each_block<bfp16>(terms, [&](int64_t k, int64_t count, int64_t place) {
    for (int64_t row = 0; row < rows; row += MOST_COLUMNS) {
      const int64_t width = std::min(MOST_COLUMNS, rows - row);
      const auto from = reinterpret_cast<const uint16_t*>(a.at + k * a.ld + HEADER + row);
      bfp16* block = to + row * ld + place;
      for (int64_t i = 0; i < width; ++i) std::memcpy(block + i * ld, &ONE, sizeof(ONE));
      pack_words(width, count, block + HEADER, ld, [&](int64_t term, uint32_t* pairs) {
        const uint16_t *first = from + term * a.ld, *second = first + a.ld;
        if (term + 1 < count)
          for (int64_t i = 0; i < width; ++i) pairs[i] = first[i] | uint32_t{second[i]} << 16;
        else
          std::copy_n(first, width, pairs);
      });
    }
  });
}

// Stores the second word of the header of each column of a panel of B, from its `words` words of mantissas.
inline void store_corrections(uint32_t* panel, int64_t words) {
  constexpr int64_t WIDTH = PANEL<bfp8>;
  const uint32_t* from = panel + HEADER_WORDS<bfp8> * WIDTH;
  int32_t sums[WIDTH] = {};
  for (int64_t i = 0; i < words; ++i, from += WIDTH)
    for (int64_t j = 0; j < WIDTH; ++j)
      for (int shift = 0; shift < 32; shift += 8) sums[j] += static_cast<int32_t>(from[j] << shift) >> 24;
  for (int64_t j = 0; j < WIDTH; ++j) panel[WIDTH + j] = static_cast<uint32_t>(-OFFSET * sums[j]);
}

// Packs a block of columns of B with `terms` terms into whole panels, whose distance in `to` is `ld` per column. The
// columns beyond the last one are zero.
template <BlockFloat P, typename T>
inline void pack_block(const Operand<T>& b, int64_t columns, int64_t terms, P* to, int64_t ld) {
  constexpr int64_t WIDTH = PANEL<P>, HEADER = HEADER_WORDS<P>;
  const int64_t words = divide_up(terms, PER_WORD<P>);
  const auto panel_of = [&](int64_t column) { return reinterpret_cast<uint32_t*>(to + column * ld); };
  if (columns % WIDTH) std::fill_n(panel_of(columns / WIDTH * WIDTH), (words + HEADER) * WIDTH, 0u);
  if (b.transposed) {
    alignas(64) uint32_t rows[WIDTH * BLOCK_TERMS<P> / PER_WORD<P>];
    for (int64_t start = 0; start < columns; start += WIDTH) {
      uint32_t* panel = panel_of(start);
      const int64_t width = std::min(WIDTH, columns - start);
      for (int64_t j = 0; j < width; ++j) {
        const float scale = convert_row(b.at + (start + j) * b.ld, terms, reinterpret_cast<P*>(rows + j * words));
        std::memcpy(panel + j, &scale, sizeof(scale));
      }
      transpose(rows, words, width, words, panel + HEADER * WIDTH, WIDTH);
    }
  } else {
    for (int64_t group = 0; group < columns; group += MOST_COLUMNS) {
      const int64_t together = std::min(MOST_COLUMNS, columns - group);
      const ColumnBlock<P, T> block(b.at + group, b.ld, terms, together);
      for (int64_t start = 0; start < together; start += WIDTH) {
        uint32_t* panel = panel_of(group + start);
        const int64_t width = std::min(WIDTH, together - start);
        std::memcpy(panel, block.scales() + start, width * sizeof(float));
        for (int64_t i = 0; i < words; ++i)
          block.convert(PER_WORD<P> * i, start, width, panel + (HEADER + i) * WIDTH);
      }
    }
  }
  if constexpr (HEADER > 1)
    for (int64_t start = 0; start < columns; start += WIDTH) store_corrections(panel_of(start), words);
}

template <BlockFloat P, typename T>
inline void pack_columns(const Operand<T>& b, int64_t columns, int64_t terms, P* to) {
  each_block<P>(terms, [&](int64_t k, int64_t count, int64_t place) {
    pack_block(b.from(k, 0), columns, count, to + place * PANEL<P>, padded<P>(terms));
  });
}

}  // namespace sansgpu
