// Memory-bound kernels, each in one pass: dropout, gradient accumulation, gradient norm and weight updates.

#include "blocks.h"

namespace sansgpu {
namespace {

template <typename T>
void drop(const T* from, T* to, int64_t size, const Dropout& dropout) {
  for_each_block(size, [&](const Block& block) {
    const Dropout own = dropout;  // a local copy, because the compiler cannot rule out that writes alias `dropout`
    const uint32_t row = own.row(block.index, 0);
    const T* x = from + block.start;
    T* y = to + block.start;
    for (int64_t i = 0; i < block.count; ++i) store(y + i, load(x + i) * own.factor(row, i));
  });
}

// Returns 32 random bits for each element of a tensor, which depend only on the seed and the element's index.
struct Random {
  uint32_t key;
  explicit Random(int64_t seed)
      : key(Dropout::mix(Dropout::mix(static_cast<uint32_t>(seed)) + static_cast<uint32_t>(seed >> 32))) {}
  uint32_t row(int64_t block) const { return Dropout::mix(key + static_cast<uint32_t>(block)); }
  static uint32_t at(uint32_t row, int64_t place) {
    return Dropout::mix(row ^ static_cast<uint32_t>(place) * 0x9E3779B1u);
  }
};

// Rounds stochastically, which is unbiased, while rounding to nearest would lose all updates below half a unit in the
// last place. NaN is handled separately, because a carry could turn it into zero.
inline void round_randomly(bf16* to, float x, uint32_t random) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const bool nan = (word & 0x7FFFFFFF) > 0x7F800000;
  bits(to)[0] = static_cast<uint16_t>((nan ? word | 0x400000 : word + (random >> 16)) >> 16);
}
inline void round_randomly(float* to, float x, uint32_t) { *to = x; }

struct AdamW {
  float lr, beta1, beta2, eps, decay, scale, correction1, correction2;
  AdamW(double lr, double beta1, double beta2, double eps, int64_t step, double scale)
      : lr(static_cast<float>(lr)),
        beta1(static_cast<float>(beta1)),
        beta2(static_cast<float>(beta2)),
        eps(static_cast<float>(eps)),
        decay(0.0f),  // set for each weight
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

// Updates `count` weights, and their copies `working` unless null. `place` is the index of the first weight in its row
// of random bits. `a` is passed by value, because writes to floats might change it through a reference, and the loop
// would not be vectorized.
template <typename W, typename G>
void update(const AdamW a, W* weight, float* first, float* second, const G* grad, bf16* working, int64_t count,
            uint32_t row, int64_t place) {
  for (int64_t i = 0; i < count; ++i) {
    const float next = a.next(load(weight + i), first[i], second[i], load(grad + i));
    round_randomly(weight + i, next, Random::at(row, place + i));
    if (working) store(working + i, next);
  }
}

constexpr int64_t PIECE = 256;  // weights for which `is_unchanged` is called at once

template <typename T>
bool is_zero(const T* x, int64_t count) {
  std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t> word, all = 0;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&word, x + i, sizeof word);
    all |= word;
  }
  return !all;
}

// Returns true if an update would not change the weights and their moments, as in most rows of an embedding, whose
// tokens have not occurred yet. Testing for zeros takes less time than writing them again.
template <typename G>
bool is_unchanged(const AdamW& a, const float* first, const float* second, const G* grad, int64_t count) {
  return a.decay == 0.0f && is_zero(first, count) && is_zero(grad, count) && is_zero(second, count);
}

// Calls run(grad) with a pointer that has the gradient's dtype.
template <typename F>
void with_grad(const WeightUpdate& w, const F& run) {
  w.narrow_grad ? run(static_cast<const bf16*>(w.grad)) : run(static_cast<const float*>(w.grad));
}

// Calls run(weight, grad) with pointers that have the tensors' dtypes.
template <typename F>
void with_types(const WeightUpdate& w, const F& run) {
  const auto typed = [&](auto* weight) { with_grad(w, [&](const auto* grad) { run(weight, grad); }); };
  w.narrow_weight ? typed(static_cast<bf16*>(w.weight)) : typed(static_cast<float*>(w.weight));
}

// Calls run(block, weight) for each block of a list of weights.
template <typename F>
void for_each_weight(int64_t count, const WeightUpdate* weights, const F& run) {
  Blocks(count, [=](int64_t i) { return weights[i].size; }).each([&](const Block& block) {
    run(block, weights[block.array]);
  });
}

// Calls run(block, weight, settings) for each block of the weights.
template <typename F>
void for_each_weight(int64_t count, const WeightUpdate* weights, const double* decays, const AdamW& settings,
                     const F& run) {
  for_each_weight(count, weights, [&](const Block& block, const WeightUpdate& weight) {
    AdamW own = settings;
    own.decay = static_cast<float>(decays[block.array]);
    run(block, weight, own);
  });
}

// Updates `momentum` with the clipped gradients and writes Nesterov's look-ahead to `direction`.
template <typename G>
void look_ahead(float beta, float scale, const G* grad, float* momentum, float* direction, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = load(grad + i) * scale, m = momentum[i] + (1.0f - beta) * (g - momentum[i]);
    momentum[i] = m;
    direction[i] = g + beta * (m - g);
  }
}

template <typename G>
void move(float keep, float rate, const G* grad, float* weight, bf16* working, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float next = keep * weight[i] - rate * load(grad + i);
    weight[i] = next;
    if (working) store(working + i, next);
  }
}

// --- 8-bit moments; kernels/update.py defines the codes

constexpr int64_t GROUP = MOMENT_GROUP;
constexpr int DECADES = MOMENT_DECADES;
static_assert(GRAIN % GROUP == 0, "a group lies in one block");

// Finds the nearest code without a search. Within a decade (a factor of 10) the codes are linear: x belongs to code
// number `place` if x * slope + offset is in [place, place + 1). The lowest decade has `lowest` codes; each higher
// decade has twice as many.
struct Places {
  float edge[DECADES], slope[DECADES], offset[DECADES], one;  // edges and `one` are midpoints between neighboring codes
  constexpr explicit Places(int lowest) : edge(), slope(), offset(), one() {
    double unit = 1e-6, count = lowest;
    for (int d = 0; d < DECADES; ++d, unit *= 10, count *= 2) {
      slope[d] = static_cast<float>(count / (0.9 * unit));
      offset[d] = static_cast<float>(count - count / 9);
      if (d + 1 < DECADES) edge[d + 1] = static_cast<float>(unit * (1 + 0.9 / count));
      one = static_cast<float>(1 - 0.225 / count);
    }
  }
  int32_t operator()(float x) const {  // for 0 <= x <= 1; returns at least lowest - 1, even if 0 is nearer
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

// Never returns 0 for a positive value, because dividing the first moment by a second moment of 0 would cause a huge
// step.
inline uint8_t unsigned_code(float x) {
  constexpr Places places(2);
  return static_cast<uint8_t>(x > 0 ? std::max(places(x) - 1, 1) : 0);
}

// Returns the largest absolute value, or NaN if there is one. Compares integers, among which NaN is larger than all
// other values.
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

// Writes the codes of one block and returns their scale, or 0 if its inverse overflows. NaN and infinity make the whole
// block NaN.
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
  void read(int64_t group, int64_t count, float* to) const {
    const uint8_t* from = codes + group * GROUP;
    const float scale = scales[group];
    for (int64_t i = 0; i < count; ++i) to[i] = scale * map[from[i]];
  }
  template <uint8_t (*code)(float)>
  void write(int64_t group, int64_t count, const float* from) const {
    scales[group] = quantize<code>(from, codes + group * GROUP, count);
  }
};

}  // namespace

// Computes dropout of `size` values. The function is linear in x, so it is its own backward pass.
SANSGPU_KERNEL void dropout(int64_t narrow, const void* x, void* out, int64_t size, double p, const int64_t* seed) {
  const Dropout how(p, *seed);
  narrow ? drop(static_cast<const bf16*>(x), static_cast<bf16*>(out), size, how)
         : drop(static_cast<const float*>(x), static_cast<float*>(out), size, how);
}

// Computes sum (fp32) += addend (bf16).
SANSGPU_KERNEL void accumulate(float* sum, const void* addend, int64_t size) {
  const auto terms = static_cast<const bf16*>(addend);
  for_each_block(size, [&](const Block& block) {
    for (int64_t i = block.start; i < block.start + block.count; ++i) sum[i] += load(terms + i);
  });
}

// Writes the sum of squares of each of `count` arrays. Sums of blocks are added in order, so that results do not depend
// on the number of threads.
SANSGPU_KERNEL void squared_norms(int64_t count, const void* const* arrays, const int64_t* sizes, const int64_t* narrow,
                                  double* totals) {
  const Blocks blocks(count, [=](int64_t i) { return sizes[i]; });
  Buffer<double> sums(blocks.end(count - 1));
  blocks.each([&](const Block& block) {
    const void* x = arrays[block.array];
    sums[block.unit] = narrow[block.array] ? squares(static_cast<const bf16*>(x) + block.start, block.count)
                                           : squares(static_cast<const float*>(x) + block.start, block.count);
  });
  for (int64_t array = 0; array < count; ++array) {
    totals[array] = 0;
    for (int64_t unit = blocks.end(array - 1); unit < blocks.end(array); ++unit) totals[array] += sums[unit];
  }
}

// AdamW: updates the weights, their moments and their working copies.
SANSGPU_KERNEL void adamw(int64_t count, const WeightUpdate* weights, const double* decays, double lr, double beta1,
                          double beta2, double eps, int64_t step, double scale) {
  const AdamW settings(lr, beta1, beta2, eps, step, scale);
  for_each_weight(count, weights, decays, settings, [](const Block& block, const WeightUpdate& w, const AdamW& own) {
    float *first = static_cast<float*>(w.moments[0]), *second = static_cast<float*>(w.moments[1]);
    const uint32_t row = Random(w.seed).row(block.index);
    with_types(w, [&](auto* weight, const auto* grad) {
      for (int64_t place = 0; place < block.count; place += PIECE) {
        const int64_t at = block.start + place, count = std::min(PIECE, block.count - place);
        if (is_unchanged(own, first + at, second + at, grad + at, count)) continue;
        update(own, weight + at, first + at, second + at, grad + at, w.working ? w.working + at : nullptr, count, row,
               place);
      }
    });
  });
}

// Updates the first moments, i.e. the momentum of fp32 weights, with gradients times `scale`. Writes the update
// directions to the second moments.
SANSGPU_KERNEL void nesterov(int64_t count, const WeightUpdate* weights, double beta, double scale) {
  for_each_weight(count, weights, [=](const Block& block, const WeightUpdate& w) {
    const int64_t at = block.start;
    float *momentum = static_cast<float*>(w.moments[0]) + at, *direction = static_cast<float*>(w.moments[1]) + at;
    with_grad(w, [&](const auto* grad) {
      look_ahead(static_cast<float>(beta), static_cast<float>(scale), grad + at, momentum, direction, block.count);
    });
  });
}

// Gradient descent: updates fp32 weights and their working copies with `grad` times `scale` and decoupled weight decay.
SANSGPU_KERNEL void descend(int64_t count, const WeightUpdate* weights, const double* decays, double lr, double scale) {
  for_each_weight(count, weights, [=](const Block& block, const WeightUpdate& w) {
    const float keep = static_cast<float>(1.0 - lr * decays[block.array]), rate = static_cast<float>(lr * scale);
    const int64_t at = block.start;
    with_grad(w, [&](const auto* grad) {
      move(keep, rate, grad + at, static_cast<float*>(w.weight) + at, w.working ? w.working + at : nullptr,
           block.count);
    });
  });
}

// Like adamw, with 8-bit moments. The maps (256,) hold the value of each code.
SANSGPU_KERNEL void adamw8(int64_t count, const WeightUpdate* weights, const double* decays, const float* first_map,
                           const float* second_map, double lr, double beta1, double beta2, double eps, int64_t step,
                           double scale) {
  const AdamW settings(lr, beta1, beta2, eps, step, scale);
  for_each_weight(count, weights, decays, settings, [=](const Block& block, const WeightUpdate& w, const AdamW& own) {
    const Moments first{static_cast<uint8_t*>(w.moments[0]), static_cast<float*>(w.moments[1]), first_map};
    const Moments second{static_cast<uint8_t*>(w.moments[2]), static_cast<float*>(w.moments[3]), second_map};
    const uint32_t row = Random(w.seed).row(block.index);
    float m[GROUP], v[GROUP];
    for (int64_t at = block.start; at < block.start + block.count; at += GROUP) {
      const int64_t group = at / GROUP, count = std::min(GROUP, block.start + block.count - at);
      first.read(group, count, m);
      second.read(group, count, v);
      with_types(w, [&](auto* weight, const auto* grad) {
        update(own, weight + at, m, v, grad + at, w.working ? w.working + at : nullptr, count, row, at - block.start);
      });
      first.write<signed_code>(group, count, m);
      second.write<unsigned_code>(group, count, v);
    }
  });
}

}  // namespace sansgpu
