// The block formats of GGUF, which store consecutive values of a row in few bits (see llama.cpp's ggml-common.h).
//
// All are read in groups of 32 values. Each value is rounded at most once, so dequantized values equal those of
// llama.cpp.
#pragma once

#include <type_traits>

#include "tiles.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace sansgpu {

constexpr int64_t GROUP = 32;

// Converts fp16 to fp32. Subnormal fp16 numbers stay exact even if the processor flushes subnormal fp32 numbers to 0.
inline float load_half(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
#ifdef __F16C__
  return _cvtsh_ss(half);
#else
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  const uint32_t bits = (half & 0x7FFFu) << 13, bias = 112u << 23;
  const uint32_t moved = exponent == 31 ? bits + 2 * bias : bits + bias;
  float magnitude;
  std::memcpy(&magnitude, &moved, 4);
  if (exponent == 0) magnitude = static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-24f;
  return half & 0x8000 ? -magnitude : magnitude;
#endif
}

// 16 codes of one byte each, in a vector register.
typedef uint8_t Codes __attribute__((vector_size(16)));

inline Codes load_codes(const uint8_t* from) {
  Codes codes;
  std::memcpy(&codes, from, sizeof(codes));
  return codes;
}

// Returns (byte >> shift) & mask for each byte.
inline Codes field(Codes bytes, int shift, uint8_t mask) {
  typedef uint64_t Words __attribute__((vector_size(16)));
  return (Codes)((Words)bytes >> shift) & mask;
}

// Returns 16 bytes, each of which is `value` if its bit of the two bytes is set, and 0 otherwise.
inline Codes spread_bits(const uint8_t* from, uint8_t value) {
  const Codes bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint64_t words[2] = {from[0] * 0x0101010101010101u, from[1] * 0x0101010101010101u};
  Codes bytes;
  std::memcpy(&bytes, words, sizeof(bytes));
  return (Codes)((bytes & bits) != 0) & value;
}

// Returns table[code] for 16 codes below 16.
inline Codes look_up(const Codes& table, Codes codes) {
#ifdef __AVX2__
  return (Codes)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#else
  Codes found;
  for (int64_t i = 0; i < 16; ++i) found[i] = table[codes[i]];
  return found;
#endif
}

// Stores scale * code + offset for 16 signed codes.
inline void scale_codes(Codes codes, float scale, float offset, float* to) {
#if defined(__AVX512F__)
  const __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
  _mm512_storeu_ps(to, _mm512_fmadd_ps(wide, _mm512_set1_ps(scale), _mm512_set1_ps(offset)));
#elif defined(__AVX2__)
  const __m256 factor = _mm256_set1_ps(scale), summand = _mm256_set1_ps(offset);
  const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
  _mm256_storeu_ps(to, _mm256_fmadd_ps(low, factor, summand));
  _mm256_storeu_ps(to + 8, _mm256_fmadd_ps(high, factor, summand));
#else
  int8_t each[16];
  std::memcpy(each, &codes, sizeof(each));
  for (int64_t i = 0; i < 16; ++i) to[i] = scale * static_cast<float>(each[i]) + offset;
#endif
}

// Receives the codes of values instead of the values, with the scale and the offset of every 16.
struct RawCodes {
  int8_t* codes;
  float *scales, *offsets;
  RawCodes operator+(int64_t values) const { return {codes + values, scales + values / 16, offsets + values / 16}; }
};

inline void scale_codes(Codes codes, float scale, float offset, RawCodes to) {
  std::memcpy(to.codes, &codes, sizeof(codes));
  *to.scales = scale;
  *to.offsets = offset;
}

// Dequantizes 4-bit codes to scale * code + offset.
class NibbleValues {
 public:
  NibbleValues(float scale, float offset) : scale_(scale), offset_(offset) {
#ifdef __AVX512F__
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    each_ = _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
#endif
  }

  // Dequantizes 16 codes, which start at bit `shift` of each byte.
  template <typename To>
  void store(Codes bytes, int shift, To to) const {
#ifdef __AVX512F__
    if constexpr (std::is_same_v<To, float*>) {
      const __m512i codes = _mm512_srli_epi32(_mm512_cvtepu8_epi32((__m128i)bytes), static_cast<unsigned>(shift));
      return _mm512_storeu_ps(to, _mm512_permutexvar_ps(codes, each_));  // uses only the lowest 4 bits of each index
    }
#endif
    scale_codes(field(bytes, shift, 15), scale_, offset_, to);
  }

 private:
#ifdef __AVX512F__
  __m512 each_;
#endif
  float scale_, offset_;
};

// Each format has VALUES values in a block of BYTES bytes. `decode` dequantizes one group of a block to fp32, or stores
// its codes. The fp16 factor of the scales is at the byte FACTOR, that of the offsets at OFFSET_FACTOR, if there is one.
struct Q4_0 {
  static constexpr int64_t VALUES = Q4_0_VALUES, BYTES = Q4_0_BYTES, FACTOR = 0;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) {
    const float scale = load_half(block);
    const NibbleValues values(scale, -8.0f * scale);
    const Codes pairs = load_codes(block + 2);
    values.store(pairs, 0, to);
    values.store(pairs, 4, to + 16);
  }
};

struct Q4_1 {
  static constexpr int64_t VALUES = Q4_1_VALUES, BYTES = Q4_1_BYTES, FACTOR = 0, OFFSET_FACTOR = 2;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) {
    const NibbleValues values(load_half(block), load_half(block + 2));
    const Codes pairs = load_codes(block + 4);
    values.store(pairs, 0, to);
    values.store(pairs, 4, to + 16);
  }
};

// After the factors, a block of q5_0 or q5_1 has the highest bits of its 5-bit codes, then their lower 4 bits.
template <typename To>
inline void decode_5_bits(const uint8_t* bits, float scale, float offset, To to) {
  const Codes pairs = load_codes(bits + 4);
  scale_codes(field(pairs, 0, 15) | spread_bits(bits, 16), scale, offset, to);
  scale_codes(field(pairs, 4, 15) | spread_bits(bits + 2, 16), scale, offset, to + 16);
}

struct Q5_0 {
  static constexpr int64_t VALUES = Q5_0_VALUES, BYTES = Q5_0_BYTES, FACTOR = 0;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) {
    const float scale = load_half(block);
    decode_5_bits(block + 2, scale, -16.0f * scale, to);
  }
};

struct Q5_1 {
  static constexpr int64_t VALUES = Q5_1_VALUES, BYTES = Q5_1_BYTES, FACTOR = 0, OFFSET_FACTOR = 2;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) {
    decode_5_bits(block + 4, load_half(block), load_half(block + 2), to);
  }
};

struct Q8_0 {
  static constexpr int64_t VALUES = Q8_0_VALUES, BYTES = Q8_0_BYTES, FACTOR = 0;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) {
    const float scale = load_half(block);
    scale_codes(load_codes(block + 2), scale, 0.0f, to);
    scale_codes(load_codes(block + 18), scale, 0.0f, to + 16);
  }
};

// Formats iq4_nl and iq4_xs store 4-bit indices into this table of values.
constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <typename To>
inline void decode_uneven(const uint8_t* pairs, float scale, To to) {
  const Codes table = load_codes(reinterpret_cast<const uint8_t*>(UNEVEN)), codes = load_codes(pairs);
  scale_codes(look_up(table, field(codes, 0, 15)), scale, 0.0f, to);
  scale_codes(look_up(table, field(codes, 4, 15)), scale, 0.0f, to + 16);
}

struct IQ4_NL {
  static constexpr int64_t VALUES = IQ4_NL_VALUES, BYTES = IQ4_NL_BYTES, FACTOR = 0;

  template <typename To>
  static void decode(const uint8_t* block, int64_t, To to) { decode_uneven(block + 2, load_half(block), to); }
};

// A block has an fp16 factor, then the upper 2 bits of 8 scales in 2 bytes, their lower 4 bits in 4, and the codes.
struct IQ4_XS {
  static constexpr int64_t VALUES = IQ4_XS_VALUES, BYTES = IQ4_XS_BYTES, FACTOR = 0;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const int shift = static_cast<int>(group % 4 * 2);
    const int scale = (block[4 + group / 2] >> group % 2 * 4 & 15) | (block[2 + group / 4] >> shift & 3) << 4;
    decode_uneven(block + 8 + group * GROUP / 2, load_half(block) * static_cast<float>(scale - 32), to);
  }
};

// A block has 16 scales of 4 bits, each with an offset of 4 bits, then the 2-bit codes, then the fp16 factors of the
// scales and of the offsets.
struct Q2_K {
  static constexpr int64_t VALUES = Q2_K_VALUES, BYTES = Q2_K_BYTES, FACTOR = 80, OFFSET_FACTOR = 82;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const float factor = load_half(block + FACTOR), offset_factor = load_half(block + OFFSET_FACTOR);
    const int shift = static_cast<int>(group % 4 * 2);
    for (int64_t i = 0; i < 2; ++i) {
      const int packed = block[2 * group + i];
      scale_codes(field(load_codes(block + 16 + group / 4 * GROUP + 16 * i), shift, 3),
                  factor * static_cast<float>(packed & 15), offset_factor * static_cast<float>(-(packed >> 4)),
                  to + 16 * i);
    }
  }
};

// A block has the highest bits of its 3-bit codes, then their lower 2 bits, then the lower 4 and the upper 2 bits of 16
// scales for 16 values each, then the fp16 factor of the scales.
struct Q3_K {
  static constexpr int64_t VALUES = Q3_K_VALUES, BYTES = Q3_K_BYTES, FACTOR = 108;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const uint8_t *lower = block + 32 + group / 4 * GROUP, *scales = block + 96;
    const int shift = static_cast<int>(group % 4 * 2), bit = static_cast<int>(group);
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t number = 2 * group + i;
      const int scale = (scales[number % 8] >> number / 8 * 4 & 15) | (scales[8 + number % 4] >> number / 4 * 2 & 3) << 4;
      const Codes high = field(load_codes(block + 16 * i), bit, 1);
      scale_codes((field(load_codes(lower + 16 * i), shift, 3) | high << 2) - 4,
                  load_half(block + FACTOR) * static_cast<float>(scale - 32), 0.0f, to + 16 * i);
    }
  }
};

// The scale and the offset of one of 8 groups of q4_k or q5_k, which are 6-bit integers in 12 bytes.
struct GroupLine {
  float scale, offset;

  // The block starts with the fp16 factors of the scales and of the offsets.
  GroupLine(const uint8_t* block, int64_t group) {
    const uint8_t* packed = block + 4;
    const bool last = group >= 4;  // their upper bits are in the bytes of the first four groups
    const int first = last ? (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4 : packed[group] & 63;
    const int second = last ? packed[group + 4] >> 4 | packed[group] >> 6 << 4 : packed[group + 4] & 63;
    scale = load_half(block) * static_cast<float>(first);
    offset = load_half(block + 2) * static_cast<float>(-second);
  }
};

// A block has 16 bytes of scales and offsets, then the highest bits of the 5-bit codes, then their lower 4 bits.
struct Q5_K {
  static constexpr int64_t VALUES = Q5_K_VALUES, BYTES = Q5_K_BYTES, FACTOR = 0, OFFSET_FACTOR = 2;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const GroupLine line(block, group);
    const uint8_t* pairs = block + 48 + group / 2 * GROUP;
    for (int64_t i = 0; i < GROUP; i += 16) {
      const Codes low = field(load_codes(pairs + i), group % 2 ? 4 : 0, 15);
      const Codes high = field(load_codes(block + 16 + i), static_cast<int>(group), 1);
      scale_codes(low | high << 4, line.scale, line.offset, to + i);
    }
  }
};

// A block has 16 bytes of scales and offsets, then the 4-bit codes.
struct Q4_K {
  static constexpr int64_t VALUES = Q4_K_VALUES, BYTES = Q4_K_BYTES, FACTOR = 0, OFFSET_FACTOR = 2;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const GroupLine line(block, group);
    const uint8_t* pairs = block + 16 + group / 2 * GROUP;
    const NibbleValues values(line.scale, line.offset);
    const int shift = group % 2 ? 4 : 0;
    values.store(load_codes(pairs), shift, to);
    values.store(load_codes(pairs + 16), shift, to + 16);
  }
};

// A block has the lower 4 bits of the codes, then their upper 2 bits, then 16 scales for 16 values each, then the fp16
// factor of the scales.
struct Q6_K {
  static constexpr int64_t VALUES = Q6_K_VALUES, BYTES = Q6_K_BYTES, FACTOR = 208;

  template <typename To>
  static void decode(const uint8_t* block, int64_t group, To to) {
    const int64_t half = group / 4;
    const int quarter = static_cast<int>(group % 4);
    const uint8_t *lower = block + half * 64 + quarter % 2 * GROUP, *upper = block + 128 + half * GROUP;
    const auto scales = reinterpret_cast<const int8_t*>(block + 192 + 2 * group);
    const float factor = load_half(block + FACTOR);
    for (int64_t i = 0; i < 2; ++i) {
      const Codes low = field(load_codes(lower + 16 * i), quarter / 2 * 4, 15);
      const Codes high = field(load_codes(upper + 16 * i), 2 * quarter, 3);
      scale_codes((low | high << 4) - 32, factor * static_cast<float>(scales[i]), 0.0f, to + 16 * i);
    }
  }
};

template <typename... Formats>
constexpr bool are_one_group = ((Formats::VALUES == GROUP) && ...);
template <typename... Formats>
constexpr bool are_eight_groups = ((Formats::VALUES == 8 * GROUP) && ...);
static_assert(are_one_group<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL> && are_eight_groups<Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS>);

// Calls run(format) with the format that has this number.
template <typename Run>
auto with_format(int64_t number, const Run& run) {
  switch (number) {
    case Q4_0_NUMBER:
      return run(Q4_0());
    case Q4_1_NUMBER:
      return run(Q4_1());
    case Q5_0_NUMBER:
      return run(Q5_0());
    case Q5_1_NUMBER:
      return run(Q5_1());
    case Q8_0_NUMBER:
      return run(Q8_0());
    case IQ4_NL_NUMBER:
      return run(IQ4_NL());
    case IQ4_XS_NUMBER:
      return run(IQ4_XS());
    case Q2_K_NUMBER:
      return run(Q2_K());
    case Q3_K_NUMBER:
      return run(Q3_K());
    case Q4_K_NUMBER:
      return run(Q4_K());
    case Q5_K_NUMBER:
      return run(Q5_K());
    default:
      return run(Q6_K());
  }
}

}  // namespace sansgpu
