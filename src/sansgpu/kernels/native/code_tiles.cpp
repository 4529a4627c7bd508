// The tiles of code_tiles.h, and their product for each instruction set.
//
// A tile has panels of PANEL_OUTPUTS outputs. For each block of its format, a panel has the factors of all its outputs,
// and for each group of 32 values their scales, their offsets and their codes, interleaved so that a vector has 4 codes
// of each output. Codes of up to 4 bits are stored in 4 bits, and others in signed bytes. Nothing is rounded: scales and
// offsets are stored as in the format, as fp16 numbers or as integers times fp16 factors.

#include "code_tiles.h"

#include "block_floats.h"
#include "block_formats.h"
#include "matmul.h"
#include "parallel.h"
#include "product_mantissas.h"

namespace sansgpu {
namespace {

constexpr int64_t PANEL_OUTPUTS = 16, HALF = GROUP / 2, CODE_WORDS = GROUP / 4;
static_assert(STEP_TILE % PANEL_OUTPUTS == 0 && PANEL_OUTPUTS % WIDTH == 0);

// Describes how a panel stores the groups of a format. A value is scale * (code - center) + offset.
struct CodeLayout {
  bool nibbles;         // codes have 4 bits, otherwise they are signed bytes
  bool has_offsets;
  bool has_factors;     // scales and offsets are integers times the factors of a block
  int64_t scales;       // per group: 1, or 2 of 16 values each
  int32_t center;
  int8_t shift;         // added to the codes of the format when they are packed

  constexpr int64_t code_bytes() const { return (nibbles ? GROUP / 2 : GROUP) * PANEL_OUTPUTS; }
  constexpr int64_t scale_bytes() const { return scales * (has_factors ? 1 : 2) * PANEL_OUTPUTS; }
  constexpr int64_t group_bytes() const { return scale_bytes() * (has_offsets ? 2 : 1) + code_bytes(); }
  constexpr int64_t factor_bytes() const { return has_factors ? (has_offsets ? 4 : 2) * PANEL_OUTPUTS : 0; }
};

template <typename Format>
constexpr CodeLayout layout_of() {
  constexpr auto is_one_of = []<typename... Formats>(Formats...) { return (std::is_same_v<Format, Formats> || ...); };
  constexpr bool nibbles = is_one_of(Q4_0(), Q4_1(), Q4_K(), Q3_K(), Q2_K());
  constexpr bool has_offsets = requires { Format::OFFSET_FACTOR; };
  constexpr int64_t scales = is_one_of(Q2_K(), Q3_K(), Q6_K()) ? 2 : 1;
  constexpr int32_t center = is_one_of(Q4_0()) ? 8 : is_one_of(Q3_K()) ? 4 : 0;
  constexpr int8_t shift = is_one_of(Q5_0()) ? -16 : is_one_of(Q3_K()) ? 4 : 0;
  return {nibbles, has_offsets, Format::VALUES > GROUP, scales, center, shift};
}

// Returns the bytes of a panel with rows of `terms` values.
template <typename Format>
constexpr int64_t panel_bytes(int64_t terms) {
  constexpr CodeLayout LAYOUT = layout_of<Format>();
  return terms / Format::VALUES * (LAYOUT.factor_bytes() + Format::VALUES / GROUP * LAYOUT.group_bytes());
}

// Packs rows of a weight, at most PANEL_OUTPUTS, as a panel.
template <typename Format>
void pack_code_panel(const uint8_t* rows, int64_t outputs, int64_t terms, uint8_t* to) {
  constexpr CodeLayout LAYOUT = layout_of<Format>();
  const int64_t ld = terms / Format::VALUES * Format::BYTES;
  const auto copy_half = [](const uint8_t* from, uint8_t* half) { std::memcpy(half, from, 2); };
  // Returns value / factor, which is an integer unless the factor is 0 or not finite.
  const auto multiple = [](float value, const uint8_t* factor) {
    const float ratio = value / load_half(factor);
    return static_cast<uint8_t>(std::abs(ratio) < 129.0f ? static_cast<int32_t>(std::lrint(ratio)) : 1);
  };
  std::memset(to, 0, panel_bytes<Format>(terms));
  for (int64_t done = 0; done < terms; done += Format::VALUES, rows += Format::BYTES) {
    uint8_t* groups = to + LAYOUT.factor_bytes();
    for (int64_t j = 0; j < outputs; ++j) {
      const uint8_t *block = rows + j * ld, *factor = block + Format::FACTOR, *offset_factor = factor;
      if constexpr (LAYOUT.has_offsets) offset_factor = block + Format::OFFSET_FACTOR;
      if (LAYOUT.has_factors) copy_half(factor, to + 2 * j);
      if (LAYOUT.has_factors && LAYOUT.has_offsets) copy_half(offset_factor, to + 2 * (PANEL_OUTPUTS + j));
      for (int64_t group = 0; group < Format::VALUES / GROUP; ++group) {
        int8_t codes[GROUP];
        float scales[2], offsets[2];
        Format::decode(block, group, RawCodes{codes, scales, offsets});
        uint8_t *own = groups + group * LAYOUT.group_bytes(), *own_offsets = own + LAYOUT.scale_bytes();
        if (LAYOUT.has_factors) {
          for (int64_t i = 0; i < LAYOUT.scales; ++i) {
            own[i * PANEL_OUTPUTS + j] = multiple(scales[i], factor);
            if (LAYOUT.has_offsets) own_offsets[i * PANEL_OUTPUTS + j] = multiple(offsets[i], offset_factor);
          }
        } else {
          copy_half(factor, own + 2 * j);
          if (LAYOUT.has_offsets) copy_half(offset_factor, own_offsets + 2 * j);
        }
        uint8_t* bytes = own + LAYOUT.group_bytes() - LAYOUT.code_bytes() + 4 * j;
        for (int64_t i = 0; i < GROUP; ++i) {
          const int64_t place = LAYOUT.nibbles ? i % HALF : i;
          const auto code = static_cast<uint8_t>(codes[i] + LAYOUT.shift);
          bytes[place / 4 * 4 * PANEL_OUTPUTS + place % 4] |= static_cast<uint8_t>(code << (place < i ? 4 : 0));
        }
      }
    }
    to = groups + Format::VALUES / GROUP * LAYOUT.group_bytes();
  }
}

template <typename Format>
constexpr int64_t tile_bytes(int64_t terms) {
  return STEP_TILE / PANEL_OUTPUTS * panel_bytes<Format>(terms);
}

template <typename Format>
void pack_tile(const uint8_t* weight, int64_t N, int64_t terms, int64_t tile, uint8_t* to) {
  const int64_t first = tile * STEP_TILE, row_bytes = terms / Format::VALUES * Format::BYTES;
  to += tile * tile_bytes<Format>(terms);
  for (int64_t j = first; j < first + STEP_TILE; j += PANEL_OUTPUTS, to += panel_bytes<Format>(terms))
    pack_code_panel<Format>(weight + j * row_bytes, std::clamp<int64_t>(N - j, 0, PANEL_OUTPUTS), terms, to);
}

// Precedes the integers of a group of a row, and has their scale and their sums.
struct GroupHeader {
  float scale;
  float sum, sums[2];     // the sum of all integers, and the sums of each half, times the scale
  int32_t totals[2];      // the sums of the integers of each half
  int32_t unused[2];
};

// A packed row has a header for each group, followed by its integers as signed bytes. With two parts, the integers have
// 16 bits: 256 times a byte plus another byte, and all first bytes of a group precede the second ones.
constexpr int64_t packed_group_bytes(int64_t parts) { return sizeof(GroupHeader) + parts * GROUP; }

template <int64_t PARTS, typename T>
void pack_row(const T* from, int64_t terms, uint8_t* to) {
  constexpr float UNIT = PARTS == 2 ? 256.0f : 1.0f;
  for (int64_t k = 0; k < terms; k += GROUP, from += GROUP, to += packed_group_bytes(PARTS)) {
    const BlockScale<bfp8> block(largest_magnitude_bits(from, GROUP));
    const float factor = block.inverse * UNIT;
    int8_t bytes[PARTS][GROUP];
    int32_t totals[2] = {};
    for (int64_t i = 0; i < GROUP; ++i) {
      const int32_t value = static_cast<int16_t>(rounded_bits(load(from + i) * factor));
      int32_t first = value;
      if constexpr (PARTS == 2) {
        first = (value + 128) >> 8;
        // The second byte is at least -127, so that its negative is also a byte.
        bytes[1][i] = static_cast<int8_t>(std::max(value - (first << 8), -BlockFormat<bfp8>::LARGEST));
      }
      bytes[0][i] = static_cast<int8_t>(first);
    }
    for (int64_t i = 0; i < GROUP; ++i)
      totals[i / HALF] += PARTS == 2 ? (bytes[0][i] << 8) + bytes[PARTS - 1][i] : bytes[0][i];
    const float scale = block.scale * (1.0f / UNIT);
    const float sums[2] = {scale * static_cast<float>(totals[0]), scale * static_cast<float>(totals[1])};
    const float sum = scale * static_cast<float>(totals[0] + totals[1]);
    const GroupHeader header{scale, sum, {sums[0], sums[1]}, {totals[0], totals[1]}, {}};
    std::memcpy(to, &header, sizeof(header));
    std::memcpy(to + sizeof(header), bytes, sizeof(bytes));
  }
}

// Adds products of signed bytes `a` and codes, and keeps the sums of pairs apart where the instructions do. Eight
// products of 4-bit codes in each sum do not overflow.
inline Ints add_codes(Ints sums, Ints codes, Ints a) {
#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
  return (Ints)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)codes, (__m512i)a));
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
  return (Ints)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)codes, (__m256i)a));
#else
  return add_mantissas<bfp8>(sums, codes, a);
#endif
}

inline Ints joined(Ints sums) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  return sum_of_pairs(sums, Ints{} + 0x00010001);
#else
  return sums;
#endif
}

// Adds products of signed bytes. Adds OFFSET times the sum of `a`, too.
inline Ints add_bytes(Ints sums, Ints codes, Ints a) {
  if constexpr (OFFSET != 0) return add_mantissas<bfp8>(sums, codes ^ static_cast<int32_t>(BlockFormat<bfp8>::FLIP), a);
  return add_mantissas<bfp8>(sums, a, codes);
}

inline Floats load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Floats values;
  for (int64_t i = 0; i < WIDTH; ++i) values[i] = load_half(from + 2 * i);
  return values;
#endif
}

inline Floats load_bytes(const uint8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(load_as<Bytes>(from), Floats);
}

// Computes sums (ROWS, PANEL_OUTPUTS), whose rows have a distance of STEP_TILE, as packed rows times a panel of a weight.
// `ld` is the distance of the packed rows in bytes.
template <typename Format, int64_t PARTS, int64_t ROWS>
class PanelProduct {
 public:
  [[gnu::flatten]] static void run(const uint8_t* panel, int64_t terms, const uint8_t* rows, int64_t ld, float* sums) {
    Floats results[ROWS][VECTORS] = {};
    for (int64_t done = 0; done < terms; done += Format::VALUES) {
      const uint8_t* factors = panel;
      panel += LAYOUT.factor_bytes();
      for (int64_t group = 0; group < Format::VALUES / GROUP; ++group) {
        for (int64_t byte = 0; byte < LAYOUT.group_bytes(); byte += 64) __builtin_prefetch(panel + AHEAD + byte);
        for (int64_t j = 0; j < VECTORS; j += TOGETHER) add_group(panel, factors, j, rows, ld, results);
        panel += LAYOUT.group_bytes();
        rows += packed_group_bytes(PARTS);
      }
    }
    for (int64_t i = 0; i < ROWS; ++i) std::memcpy(sums + i * STEP_TILE, results[i], sizeof(results[i]));
  }

 private:
  static constexpr CodeLayout LAYOUT = layout_of<Format>();
  static constexpr int64_t AHEAD = 2048;  // bytes that are prefetched
  static constexpr int64_t VECTORS = PANEL_OUTPUTS / WIDTH;
  static constexpr int64_t TOGETHER = ROWS == 1 ? std::min<int64_t>(2, VECTORS) : 1;  // vectors in registers

  // Returns a vector of the scales (or of the offsets, with `offset`) of the outputs from `first` on.
  static Floats scales_of(const uint8_t* group, const uint8_t* factors, int64_t part, bool offset, int64_t first) {
    const uint8_t* from = group + (offset ? LAYOUT.scale_bytes() : 0);
    if constexpr (!LAYOUT.has_factors) return load_halves(from + 2 * first);
    const Floats factor = load_halves(factors + 2 * (first + (offset ? PANEL_OUTPUTS : 0)));
    return factor * load_bytes(from + part * PANEL_OUTPUTS + first);
  }

  // Adds the products of a group with the outputs of the vectors from `first` on.
  static void add_group(const uint8_t* group, const uint8_t* factors, int64_t first, const uint8_t* rows, int64_t ld,
                        Floats (&results)[ROWS][VECTORS]) {
    constexpr bool ARE_SPLIT = LAYOUT.nibbles && LAYOUT.scales == 2;  // the lower and the upper bits have own scales
    constexpr int64_t LOADS = LAYOUT.nibbles ? CODE_WORDS / 2 : CODE_WORDS / LAYOUT.scales;
    unrolled<LAYOUT.scales>([&](auto part) {
      const uint8_t* codes = group + LAYOUT.group_bytes() - LAYOUT.code_bytes() + first * VECTOR_BYTES;
      if constexpr (!LAYOUT.nibbles) codes += part * LOADS * 4 * PANEL_OUTPUTS;
      const uint8_t* a = rows + sizeof(GroupHeader) + part * HALF;
      Ints sums[ROWS][PARTS][TOGETHER] = {};
#pragma GCC unroll 1  // GCC would reorder the sums, which then do not fit into the registers
      for (int64_t load = 0; load < LOADS; ++load, codes += 4 * PANEL_OUTPUTS, a += 4) {
        Ints loaded[TOGETHER];
        unrolled<TOGETHER>([&](auto j) { loaded[j] = load_as<Ints>(codes + j * VECTOR_BYTES); });
        if constexpr (!ARE_SPLIT || part == 0) add_words<0>(sums, loaded, a, ld);
        if constexpr (LAYOUT.nibbles && !ARE_SPLIT) add_words<4>(sums, loaded, a + HALF, ld);
        if constexpr (ARE_SPLIT && part == 1) add_words<4>(sums, loaded, a, ld);
      }
      unrolled<TOGETHER>([&](auto j) {
        const int64_t vector = first + j;
        const Floats scales = scales_of(group, factors, part, false, vector * WIDTH);
        Floats offsets;
        if constexpr (LAYOUT.has_offsets) offsets = scales_of(group, factors, part, true, vector * WIDTH);
        unrolled<ROWS>([&](auto row) {
          const auto header = reinterpret_cast<const GroupHeader*>(rows + row * ld);
          Ints total = exact(sums[row][0][j]);
          if constexpr (PARTS == 2) total = (total << 8) + exact(sums[row][1][j]);
          if constexpr (SUBTRACTED != 0)
            total -= SUBTRACTED * (LAYOUT.scales == 1 ? header->totals[0] + header->totals[1] : header->totals[part]);
          Floats& result = results[row][vector];
          result += __builtin_convertvector(total, Floats) * (scales * header->scale);
          if constexpr (LAYOUT.has_offsets) result += offsets * (LAYOUT.scales == 1 ? header->sum : header->sums[part]);
        });
      });
    });
  }

  // Adds the products with one word of codes of each output. Codes of 4 bits start at bit SHIFT of each byte.
  template <int SHIFT>
  static void add_words(Ints (&sums)[ROWS][PARTS][TOGETHER], const Ints (&loaded)[TOGETHER], const uint8_t* a,
                        int64_t ld) {
    Ints codes[TOGETHER];
    unrolled<TOGETHER>([&](auto j) {
      codes[j] = LAYOUT.nibbles ? (Ints)((Pairs)loaded[j] >> SHIFT & 0x0F0F0F0F) : loaded[j];
    });
    unrolled<ROWS * PARTS>([&](auto unit) {
      const Ints word = Ints{} + load_as<int32_t>(a + unit / PARTS * ld + unit % PARTS * GROUP);
      unrolled<TOGETHER>([&](auto j) {
        Ints& sum = sums[unit / PARTS][unit % PARTS][j];
        sum = LAYOUT.nibbles ? add_codes(sum, codes[j], word) : add_bytes(sum, codes[j], word);
      });
    });
  }

  // Each code is too large by this number in the sums.
  static constexpr int32_t SUBTRACTED = LAYOUT.center + (LAYOUT.nibbles ? 0 : OFFSET);

  static Ints exact(Ints sums) { return LAYOUT.nibbles ? joined(sums) : sums; }
};

template <typename Format, int64_t PARTS>
void multiply_tile(const uint8_t* tile, int64_t terms, int64_t rows, const uint8_t* packed, float* sums) {
  const int64_t ld = terms / GROUP * packed_group_bytes(PARTS);
  for (int64_t first = 0; first < STEP_TILE; first += PANEL_OUTPUTS, tile += panel_bytes<Format>(terms)) {
    const auto multiply = [&](auto count, int64_t row) {
      PanelProduct<Format, PARTS, count>::run(tile, terms, packed + row * ld, ld, sums + row * STEP_TILE + first);
    };
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) multiply(std::integral_constant<int64_t, 4>(), row);
    if (row + 2 <= rows) multiply(std::integral_constant<int64_t, 2>(), row), row += 2;
    if (row < rows) multiply(std::integral_constant<int64_t, 1>(), row);
  }
}

}  // namespace

int64_t code_tile_bytes(int64_t format, int64_t terms) {
  return with_format(format, [&]<typename Format>(Format) { return tile_bytes<Format>(terms); });
}

int64_t integer_row_bytes(int64_t parts, int64_t terms) { return terms / GROUP * packed_group_bytes(parts); }

template <typename T>
void pack_integer_row(int64_t parts, const T* from, int64_t terms, uint8_t* to) {
  parts == 2 ? pack_row<2>(from, terms, to) : pack_row<1>(from, terms, to);
}
template void pack_integer_row(int64_t, const float*, int64_t, uint8_t*);
template void pack_integer_row(int64_t, const bf16*, int64_t, uint8_t*);

void multiply_code_tile(int64_t format, int64_t parts, int64_t terms, const uint8_t* tile, int64_t rows,
                        const uint8_t* packed, float* sums) {
  with_format(format, [&]<typename Format>(Format) {
    (parts == 2 ? multiply_tile<Format, 2> : multiply_tile<Format, 1>)(tile, terms, rows, packed, sums);
  });
}

// Packs a weight (N, terms) in a block format into tiles of its codes.
SANSGPU_KERNEL void pack_codes(int64_t format, const void* weight, int64_t N, int64_t terms, void* to) {
  with_format(format, [&]<typename Format>(Format) {
    parallel_each(divide_up(N, STEP_TILE), [=](int64_t tile) {
      pack_tile<Format>(static_cast<const uint8_t*>(weight), N, terms, tile, static_cast<uint8_t*>(to));
    });
  });
}

namespace {

template <typename T>
void multiply_by_codes(int64_t format, int64_t parts, int64_t M, int64_t N, int64_t terms, const T* x,
                       const uint8_t* tiles, const float* bias, T* y) {
  const int64_t row_bytes = integer_row_bytes(parts, terms), tile_size = code_tile_bytes(format, terms);
  const int64_t bands = divide_up(M, MOST_ROWS);
  Buffer<uint8_t> packed(M * row_bytes);
  parallel_each(M, [&](int64_t row) { pack_integer_row(parts, x + row * terms, terms, packed + row * row_bytes); });
  parallel_units(divide_up(N, STEP_TILE) * bands, [&](Units& units) {
    Buffer<float> sums(std::min(M, MOST_ROWS) * STEP_TILE);
    for (int64_t unit; units.draw(unit);) {
      const int64_t tile = unit / bands, first = unit % bands * MOST_ROWS, rows = std::min(MOST_ROWS, M - first);
      const int64_t column = tile * STEP_TILE, columns = std::min(STEP_TILE, N - column);
      multiply_code_tile(format, parts, terms, tiles + tile * tile_size, rows, packed + first * row_bytes, sums);
      const StoreWithBias<T> store{y, N, bias};
      for (int64_t row = 0; row < rows; ++row) store(first + row, column, columns, sums + row * STEP_TILE);
    }
  });
}

}  // namespace

// Computes y (M, N) = x (M, terms) W^T + bias (N,) with a packed weight. x and y are bf16 if `narrow`, otherwise fp32.
// `bias` may be null.
SANSGPU_KERNEL void code_product(int64_t narrow, int64_t format, int64_t parts, int64_t M, int64_t N, int64_t terms,
                                 const void* x, const void* tiles, const float* bias, void* y) {
  const auto run = [&]<typename T>(T) {
    multiply_by_codes(format, parts, M, N, terms, static_cast<const T*>(x), static_cast<const uint8_t*>(tiles), bias,
                      static_cast<T*>(y));
  };
  narrow ? run(bf16()) : run(float());
}

// Returns the bytes of a tile of the codes of a weight in a block format.
SANSGPU_KERNEL int64_t code_bytes_per_tile(int64_t format, int64_t terms) { return code_tile_bytes(format, terms); }

}  // namespace sansgpu
