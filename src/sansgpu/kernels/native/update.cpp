// Memory-bound kernels, each in one pass: dropout, gradient accumulation, gradient norm and AdamW.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>

#include "tiles.h"

namespace sansgpu {
namespace {

constexpr int64_t GRAIN = 1 << 15;

// Computes dropout. The function is linear in x, so it is its own backward pass.
at::Tensor dropout(const at::Tensor& x, double p, const at::Tensor& seed) {
  at::Tensor out = at::empty_like(x);
  const Dropout drop(p, *seed.data_ptr<int64_t>());
  const auto run = [&](const auto* from, auto* to) {
    at::parallel_for(0, at::divup(x.numel(), GRAIN), 1, [&](int64_t begin, int64_t end) {
      const Dropout own = drop;  // a local copy, because the compiler cannot rule out that writes alias `drop`
      for (int64_t block = begin; block < end; ++block) {
        const uint32_t row = own.row(block, 0);
        const int64_t start = block * GRAIN, count = std::min(GRAIN, x.numel() - start);
        for (int64_t i = 0; i < count; ++i) store(to + start + i, load(from + start + i) * own.factor(row, i));
      }
    });
  };
  x.scalar_type() == at::kBFloat16 ? run(x.data_ptr<bf16>(), out.data_ptr<bf16>())
                                   : run(x.data_ptr<float>(), out.data_ptr<float>());
  return out;
}

// sum (fp32) += addend (bf16).
void accumulate_(const at::Tensor& sum, const at::Tensor& addend) {
  float* to = sum.data_ptr<float>();
  const bf16* from = addend.data_ptr<bf16>();
  at::parallel_for(0, sum.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] += load(from + i);
  });
}

// Sums squares in blocks of fixed size, added in order, so that the result does not depend on the number of threads.
double squared_norm(const at::Tensor& tensor) {
  const int64_t size = tensor.numel(), blocks = at::divup(size, GRAIN);
  Buffer<double> sums(blocks);
  const auto run = [&](const auto* from) {
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const auto* x = from + block * GRAIN;
        sums[block] = sum_of(std::min(GRAIN, size - block * GRAIN), [&](int64_t i) { return load(x + i) * load(x + i); });
      }
    });
  };
  tensor.scalar_type() == at::kBFloat16 ? run(tensor.data_ptr<bf16>()) : run(tensor.data_ptr<float>());
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += sums[block];
  return total;
}

// Gives 32 random bits for each element of a tensor, which depend only on the seed and the index of the element.
struct Random {
  uint32_t key;
  explicit Random(int64_t seed)
      : key(Dropout::mix(Dropout::mix(static_cast<uint32_t>(seed)) + static_cast<uint32_t>(seed >> 32))) {}
  uint32_t row(int64_t block) const { return Dropout::mix(key + static_cast<uint32_t>(block)); }
  static uint32_t at(uint32_t row, int64_t place) {
    return Dropout::mix(row ^ static_cast<uint32_t>(place) * 0x9E3779B1u);
  }
};

// Stochastic rounding: unbiased, while rounding to nearest would lose every update below half a unit in the last place.
// NaN is handled apart, because a carry could turn it into zero.
inline void round_randomly(bf16* to, float x, uint32_t random) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const bool nan = (word & 0x7FFFFFFF) > 0x7F800000;
  bits(to)[0] = static_cast<uint16_t>((nan ? word | 0x400000 : word + (random >> 16)) >> 16);
}
inline void round_randomly(float* to, float x, uint32_t) { *to = x; }

struct AdamW {
  float lr, beta1, beta2, eps, decay, scale, correction1, correction2;
  AdamW(double lr, double beta1, double beta2, double eps, double decay, int64_t step, double scale)
      : lr(static_cast<float>(lr)),
        beta1(static_cast<float>(beta1)),
        beta2(static_cast<float>(beta2)),
        eps(static_cast<float>(eps)),
        decay(static_cast<float>(decay)),
        scale(static_cast<float>(scale)),
        correction1(static_cast<float>(1.0 / (1.0 - std::pow(beta1, step)))),
        correction2(static_cast<float>(1.0 / (1.0 - std::pow(beta2, step)))) {}

  float next(float weight, float& first, float& second, float grad) const {
    const float g = grad * scale;
    first += (1.0f - beta1) * (g - first);
    second += (1.0f - beta2) * (g * g - second);
    return weight - lr * (decay * weight + first * correction1 / (std::sqrt(second * correction2) + eps));
  }
};

// Updates `count` weights, and `working` if given. `place` is the index of the first weight in its row of random bits.
// Takes `a` by value: behind a reference, every write to a float might change it, and the loop would not be vectorized.
template <typename W, typename G>
void update(const AdamW a, W* weight, float* first, float* second, const G* grad, bf16* working, int64_t count,
            uint32_t row, int64_t place) {
  for (int64_t i = 0; i < count; ++i) {
    const float next = a.next(load(weight + i), first[i], second[i], load(grad + i));
    round_randomly(weight + i, next, Random::at(row, place + i));
    if (working) store(working + i, next);
  }
}

// Calls run(weight, grad, working) with pointers of the tensors' dtypes.
template <typename F>
void with_types(const at::Tensor& weight, const at::Tensor& grad, const std::optional<at::Tensor>& working, F run) {
  bf16* cast = working ? working->data_ptr<bf16>() : nullptr;
  const auto typed = [&](auto* w) {
    grad.scalar_type() == at::kBFloat16 ? run(w, grad.data_ptr<bf16>(), cast) : run(w, grad.data_ptr<float>(), cast);
  };
  weight.scalar_type() == at::kBFloat16 ? typed(weight.data_ptr<bf16>()) : typed(weight.data_ptr<float>());
}

// Uses blocks of fixed size: scalar remainders of vectorized loops round differently and must not depend on threads.
void adamw_(const at::Tensor& weight, const at::Tensor& first, const at::Tensor& second, const at::Tensor& grad,
            const std::optional<at::Tensor>& working, double lr, double beta1, double beta2, double eps, double decay,
            int64_t step, double scale, int64_t seed) {
  const AdamW a(lr, beta1, beta2, eps, decay, step, scale);
  const Random random(seed);
  const int64_t size = weight.numel();
  float *m = first.data_ptr<float>(), *v = second.data_ptr<float>();
  with_types(weight, grad, working, [&](auto* w, const auto* g, bf16* cast) {
    at::parallel_for(0, at::divup(size, GRAIN), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t at = block * GRAIN;
        update(a, w + at, m + at, v + at, g + at, cast ? cast + at : nullptr, std::min(GRAIN, size - at),
               random.row(block), 0);
      }
    });
  });
}

// --- 8-bit moments; kernels/quantized.py defines the codes

constexpr int64_t BLOCK = 256;
constexpr int DECADES = 7;

// Finds the nearest code without a search. Within a decade the map is linear: x belongs to value number `place` if
// x * slope + offset lies in [place, place + 1). The lowest decade has `lowest` values;
// each higher one has twice as many.
struct Places {
  float edge[DECADES], slope[DECADES], offset[DECADES], one;  // edges and `one` are midpoints between neighbors
  constexpr explicit Places(int lowest) : edge(), slope(), offset(), one() {
    double unit = 1e-6, count = lowest;
    for (int d = 0; d < DECADES; ++d, unit *= 10, count *= 2) {
      slope[d] = static_cast<float>(count / (0.9 * unit));
      offset[d] = static_cast<float>(count - count / 9);
      if (d + 1 < DECADES) edge[d + 1] = static_cast<float>(unit * (1 + 0.9 / count));
      one = static_cast<float>(1 - 0.225 / count);
    }
  }
  int32_t operator()(float x) const {  // for 0 <= x <= 1; returns at least lowest - 1 even if 0 is nearer
    float a = slope[0], b = offset[0];
    for (int d = 1; d < DECADES; ++d) {
      a = x >= edge[d] ? slope[d] : a;
      b = x >= edge[d] ? offset[d] : b;
    }
    const int32_t last = static_cast<int32_t>(b * 2.25f - 0.5f);  // index of the decade's last value, 2 * count - 1
    return std::min(static_cast<int32_t>(x * a + b), last) + (x >= one);
  }
};

inline uint8_t signed_code(float x) {
  constexpr Places places(1);
  const int32_t place = std::fabs(x) < 0.275e-6f ? 0 : places(std::fabs(x));
  return static_cast<uint8_t>(x < 0 ? std::max(-place, -127) : place);
}

// Never returns 0 for a positive value: dividing the first moment by a second moment of 0 would make a huge step.
inline uint8_t unsigned_code(float x) {
  constexpr Places places(2);
  return static_cast<uint8_t>(x > 0 ? std::max(places(x) - 1, 1) : 0);
}

// Returns the largest absolute value, or NaN if there is one: as integers, NaNs compare above all other values.
inline float largest(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, x + i, 4);
    most = std::max(most, word & 0x7FFFFFFF);
  }
  float y;
  std::memcpy(&y, &most, 4);
  return y;
}

// Writes the codes of one block and returns their scale, 0 if its inverse overflows. NaN or infinity spoils the block.
template <uint8_t (*code)(float)>
float quantize(const float* from, uint8_t* codes, int64_t count) {
  const float scale = largest(from, count);
  if (!(scale >= std::numeric_limits<float>::min() && scale <= std::numeric_limits<float>::max())) {
    std::fill(codes, codes + count, 0);
    return scale < 1.0f ? 0.0f : scale;
  }
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) codes[i] = code(from[i] * inverse);
  return scale;
}

struct Moments {
  uint8_t* codes;
  float* scales;
  const float* map;
  Moments(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& map)
      : codes(codes.data_ptr<uint8_t>()), scales(scales.data_ptr<float>()), map(map.data_ptr<float>()) {}
  void read(int64_t block, int64_t count, float* to) const {
    const uint8_t* from = codes + block * BLOCK;
    const float scale = scales[block];
    for (int64_t i = 0; i < count; ++i) to[i] = scale * map[from[i]];
  }
  template <uint8_t (*code)(float)>
  void write(int64_t block, int64_t count, const float* from) const {
    scales[block] = quantize<code>(from, codes + block * BLOCK, count);
  }
};

void adamw8_(const at::Tensor& weight, const at::Tensor& first_codes, const at::Tensor& first_scales,
             const at::Tensor& second_codes, const at::Tensor& second_scales, const at::Tensor& grad,
             const std::optional<at::Tensor>& working, const at::Tensor& first_map, const at::Tensor& second_map,
             double lr, double beta1, double beta2, double eps, double decay, int64_t step, double scale,
             int64_t seed) {
  const AdamW a(lr, beta1, beta2, eps, decay, step, scale);
  const Random random(seed);
  const int64_t size = weight.numel();
  const Moments first(first_codes, first_scales, first_map), second(second_codes, second_scales, second_map);
  with_types(weight, grad, working, [&](auto* w, const auto* g, bf16* cast) {
    at::parallel_for(0, at::divup(size, BLOCK), GRAIN / BLOCK, [&](int64_t begin, int64_t end) {
      float m[BLOCK], v[BLOCK];
      for (int64_t block = begin; block < end; ++block) {
        const int64_t at = block * BLOCK, count = std::min(BLOCK, size - at);
        first.read(block, count, m);
        second.read(block, count, v);
        update(a, w + at, m, v, g + at, cast ? cast + at : nullptr, count, random.row(at / GRAIN), at % GRAIN);
        first.write<signed_code>(block, count, m);
        second.write<unsigned_code>(block, count, v);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) {
  library.impl("dropout", &dropout);
  library.impl("accumulate_", &accumulate_);
  library.impl("squared_norm", &squared_norm);
  library.impl("adamw_", &adamw_);
  library.impl("adamw8_", &adamw8_);
}

}  // namespace sansgpu
