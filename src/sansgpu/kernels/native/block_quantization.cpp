// Quantizes weights to the formats Q4_K and Q6_K of block_formats.h, for kernels/block_quantization.py.
//
// As in llama.cpp, several scales are tried for each group of values and improved by least squares. Unlike in
// llama.cpp, all values have the same importance, and the integers that encode the scales also minimize the error of
// the quantized values.

#include "block_formats.h"
#include "parallel.h"

namespace sansgpu {
namespace {

constexpr int64_t TRIES = 21;    // number of scales to try for each group
constexpr float TRY_STEP = 0.1f;  // change of the number of codes, by which the range is divided, between tries

// Rounds a number >= 0 to fp16 and returns its bits. Returns the smallest positive fp16 instead of 0, because a factor
// of 0 would lose all values.
uint16_t round_half(float x) {
  if (x < 0x1p-14f) return static_cast<uint16_t>(x > 0 ? std::max(x * 0x1p24f + 0.5f, 1.0f) : 0.0f);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(std::min<uint32_t>((bits + 0x1000) >> 13, 0x23BFF) - (112u << 10));  // at most 65504
}

// Stores largest / most as an fp16 factor, and returns the rounded factor.
float store_factor(float largest, float most, uint8_t* to) {
  const uint16_t half = round_half(largest / most);
  std::memcpy(to, &half, 2);
  return load_half(to);
}

// Quantization of a group to scale * code + offset with codes from LOWEST to HIGHEST, and its squared error.
template <int64_t COUNT, int LOWEST, int HIGHEST>
struct Line {
  float scale, offset, error = 0;

  void round(const float* x, float* codes) {
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    float sum = 0;
    for (int64_t i = 0; i < COUNT; ++i) {
      const float place = (x[i] - offset) * inverse + (0.5f - LOWEST);
      const int32_t code = static_cast<int32_t>(std::min(std::max(place, 0.0f), HIGHEST - LOWEST + 0.5f)) + LOWEST;
      codes[i] = static_cast<float>(code);
      const float gap = scale * codes[i] + offset - x[i];
      sum += gap * gap;
    }
    error = sum;
  }

  // Quantizes, and returns the least-squares scale and offset for the resulting codes. The offset is at most 0, and is
  // 0 if the format has none.
  Line improved(const float* x, bool has_offset) {
    float codes[COUNT], sum = 0, squares = 0, products = 0, total = 0;
    round(x, codes);
    for (int64_t i = 0; i < COUNT; ++i) {
      sum += codes[i];
      squares += codes[i] * codes[i];
      products += codes[i] * x[i];
      total += x[i];
    }
    const float determinant = COUNT * squares - sum * sum;
    if (has_offset && determinant > 0) {
      const float best = (squares * total - sum * products) / determinant;
      if (best < 0) return {(COUNT * products - sum * total) / determinant, best};
    }
    return squares > 0 ? Line{products / squares, 0} : *this;
  }

  void keep_better(const Line& other) {
    if (other.error < error) *this = other;
  }
};

using Line4 = Line<GROUP, 0, 15>;
using Line6 = Line<GROUP / 2, -32, 31>;

// Returns the best of several lines, which are improved from starting points whose scale is close to extent / codes.
template <typename L>
L fit(const float* x, float extent, float codes, float offset, bool has_offset) {
  L best{0, offset};
  best.improved(x, has_offset);
  if (extent == 0) return best;
  for (int64_t i = 0; i < TRIES; ++i) {
    L line{extent / (codes + TRY_STEP * static_cast<float>(i - TRIES / 2)), offset};
    L better = line.improved(x, has_offset);
    better.improved(x, has_offset);
    best.keep_better(line);
    best.keep_better(better);
  }
  return best;
}

// Returns the best line whose scale and offset are small integer multiples of the factors, and these integers.
template <typename L>
L fit_integers(const float* x, const L& line, float factor, int most, float offset_factor, int* scale, int* offset) {
  L best{0, 0, std::numeric_limits<float>::infinity()};
  const int center = factor == 0 ? 0 : static_cast<int>(std::lround(line.scale / factor));
  const int shift = offset_factor == 0 ? 0 : static_cast<int>(std::lround(-line.offset / offset_factor));
  for (int s = std::max(center - 1, -most); s <= std::min(center + 1, most); ++s)
    for (int o = std::max(shift - 1, 0); o <= std::min(shift + 1, offset_factor == 0 ? 0 : 63); ++o) {
      float codes[GROUP];
      L tried{factor * static_cast<float>(s), -offset_factor * static_cast<float>(o)};
      tried.round(x, codes);
      if (!(tried.error < best.error)) continue;
      best = tried;
      *scale = s;
      *offset = o;
    }
  return best;
}

void quantize(Q4_K, const float* x, uint8_t* to) {
  constexpr int64_t GROUPS = Q4_K::VALUES / GROUP;
  Line4 lines[GROUPS];
  float largest = 0, deepest = 0, codes[Q4_K::VALUES];
  for (int64_t group = 0; group < GROUPS; ++group) {
    const float* own = x + group * GROUP;
    const float low = std::min(0.0f, *std::min_element(own, own + GROUP));
    const float high = std::max(0.0f, *std::max_element(own, own + GROUP));
    lines[group] = fit<Line4>(own, high - low, 15, low, true);
    largest = std::max(largest, lines[group].scale);
    deepest = std::max(deepest, -lines[group].offset);
  }
  const float factor = store_factor(largest, 63, to), offset_factor = store_factor(deepest, 63, to + 2);
  uint8_t *packed = to + 4, *pairs = to + 16;
  std::memset(packed, 0, 12);
  for (int64_t group = 0; group < GROUPS; ++group) {
    const float* own = x + group * GROUP;
    int scale = 0, offset = 0;
    fit_integers(own, lines[group], factor, 63, offset_factor, &scale, &offset).round(own, codes + group * GROUP);
    if (group < 4) {
      packed[group] |= static_cast<uint8_t>(scale);
      packed[group + 4] |= static_cast<uint8_t>(offset);
    } else {
      packed[group - 4] |= static_cast<uint8_t>(scale >> 4 << 6);
      packed[group] |= static_cast<uint8_t>(offset >> 4 << 6);
      packed[group + 4] = static_cast<uint8_t>((scale & 15) | (offset & 15) << 4);
    }
  }
  for (int64_t i = 0; i < Q4_K::VALUES / 2; ++i) {
    const float* low = codes + i / GROUP * 2 * GROUP + i % GROUP;
    pairs[i] = static_cast<uint8_t>(static_cast<int>(low[0]) | static_cast<int>(low[GROUP]) << 4);
  }
}

void quantize(Q6_K, const float* x, uint8_t* to) {
  constexpr int64_t HALF = GROUP / 2, GROUPS = Q6_K::VALUES / HALF;
  Line6 lines[GROUPS];
  float largest = 0, codes[Q6_K::VALUES];
  for (int64_t group = 0; group < GROUPS; ++group) {
    const float* own = x + group * HALF;
    const float extreme = *std::max_element(own, own + HALF, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
    lines[group] = fit<Line6>(own, extreme, -32, 0, false);
    largest = std::max(largest, std::fabs(lines[group].scale));
  }
  const float factor = store_factor(largest, 127, to + 208);
  for (int64_t group = 0; group < GROUPS; ++group) {
    int scale = 0, offset = 0;
    const float* own = x + group * HALF;
    fit_integers(own, lines[group], factor, 127, 0.0f, &scale, &offset).round(own, codes + group * HALF);
    to[192 + group] = static_cast<uint8_t>(scale);
  }
  std::memset(to, 0, 192);
  for (int64_t i = 0; i < Q6_K::VALUES; ++i) {
    const int code = static_cast<int>(codes[i]) + 32;
    const int64_t half = i / 128, quarter = i % 128 / GROUP, place = i % GROUP;
    to[half * 64 + quarter % 2 * GROUP + place] |= static_cast<uint8_t>((code & 15) << quarter / 2 * 4);
    to[128 + half * GROUP + place] |= static_cast<uint8_t>(code >> 4 << 2 * quarter);
  }
}

template <typename Format>
void quantize_each(Format format, int64_t blocks, const float* values, uint8_t* to) {
  constexpr int64_t AT_ONCE = 16;
  parallel_each(divide_up(blocks, AT_ONCE), [&](int64_t unit) {
    for (int64_t block = unit * AT_ONCE; block < std::min(blocks, (unit + 1) * AT_ONCE); ++block)
      quantize(format, values + block * Format::VALUES, to + block * Format::BYTES);
  });
}

}  // namespace

// Quantizes blocks of 256 values to q4_k or q6_k.
SANSGPU_KERNEL void quantize_q4_k(int64_t blocks, const float* values, uint8_t* to) {
  quantize_each(Q4_K(), blocks, values, to);
}

SANSGPU_KERNEL void quantize_q6_k(int64_t blocks, const float* values, uint8_t* to) {
  quantize_each(Q6_K(), blocks, values, to);
}

}  // namespace sansgpu
