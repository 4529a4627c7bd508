// The output head fused with the cross-entropy loss; kernels/cross_entropy.py has the reference.
//
// N tokens, D width, V vocabulary. Only exp(logit - shift) is stored. The shift of each token is known before the
// matmul, so that neither the maximum nor the sum of its logits takes another pass over memory. The target's
// exponential is stored as 0 and handled separately: if it is close to the sum of all exponentials, the loss and its
// gradient are small differences that would be lost in rounding.
//
// With P = bfp16, the stored exponentials become packed rows in their place, each with a single scale, so that both
// gradients read half of the memory. With P = bfp8, the rotation of the terms keeps the sum of exponentials that are
// smaller than a unit, which dithering does for bfp16.

#include <atomic>
#ifdef __AVX__
#include <immintrin.h>
#endif

#include "quantized_rows.h"
#include "softcap.h"

namespace sansgpu {
namespace {

constexpr int64_t TOKENS = 64;  // tokens whose losses a thread computes at a time
constexpr float NONE = -std::numeric_limits<float>::infinity();

// The shift is the target's logit plus this. If any logit exceeds its token's shift, all exponentials are recomputed
// with larger shifts. Exponentials of logits far below the shift become 0.
constexpr float MARGIN = 32.0f;

// Exponentials are stored multiplied by this, about exp(MARGIN), so that they do not lose digits or become zero where
// blocks of integers share a scale.
constexpr float STORED_UNIT = 0x1p46f;

struct Options {
  float smoothing, z_loss, softcap;  // softcap 0: no capping

  float capped(float x) const { return softcap == 0.0f ? x : SoftCap(softcap).value(x); }

  // Returns the derivative of `capped` at the point where its value is y.
  float slope(float y) const { return softcap == 0.0f ? 1.0f : SoftCap(softcap).slope(y); }
};

// The operands of the output head's matmuls. The weight (V, D) is an Operand or QuantizedRows.
template <typename T, typename Weight>
struct Head {
  int64_t N, D, V;
  const T* hidden;  // (N, D)
  Weight weight;
  const int64_t* targets;  // (N,), in [0, V)
};

// Returns `count` values of a row of the weight, starting at `start`. Dequantizes quantized rows into `scratch`.
template <typename T>
const T* values_of(const Operand<T>& weight, int64_t row, int64_t start, int64_t, T*) {
  return weight.at + row * weight.ld + start;
}

template <typename V>
const V* values_of(const QuantizedRows<V>& weight, int64_t row, int64_t start, int64_t count, V* scratch) {
  weight.decode(weight.at + row * weight.ld, weight.ld, 1, start, count, scratch, count);
  return scratch;
}

// Values for each token; all are (N,).
struct Tokens {
  float* logits;           // the target's logit
  float* shifts;           // subtracted from the token's logits before the exponential function
  float* larger;           // the largest logit, if it exceeds the shift, otherwise NONE
  int64_t* above;          // rank of the target: number of larger logits, and of equal ones before it; may be null
};

// Calls work(first, end) for parts of N tokens, on all threads.
template <typename F>
void each_tokens(int64_t N, const F& work) {
  parallel_each(divide_up(N, TOKENS), [&](int64_t unit) { work(unit * TOKENS, std::min(N, (unit + 1) * TOKENS)); });
}

// Stores COLUMNS values at an aligned address with non-temporal stores, which bypass the caches. The barrier at the end
// of a parallel region makes them visible to other threads.
template <typename T>
inline void stream(T* to, const float* from) {
  static_assert(COLUMNS * sizeof(T) % 64 == 0, "a row has whole vectors");
  alignas(64) T row[COLUMNS];
  store_row(row, from, COLUMNS);
#if defined(__AVX512F__)
  for (int64_t i = 0; i < COLUMNS; i += 64 / sizeof(T))
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(row + i));
#elif defined(__AVX__)
  for (int64_t i = 0; i < COLUMNS; i += 32 / sizeof(T))
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_load_si256(reinterpret_cast<__m256i*>(row + i)));
#else
  std::memcpy(to, row, sizeof(row));
#endif
}

// Finishes rows of logits: stores their exponentials, multiplied by the derivative of the softcap, and the row sums of
// each tile.
template <typename T>
struct Exponentials {
  int64_t N, V;
  const int64_t* targets;
  Tokens tokens;
  Options options;
  T* to;        // (N, V); may be null
  float* sums;  // (tiles, N), without the targets

  void operator()(int64_t token, int64_t column, int64_t count, const float* logits) const {
    alignas(64) float copy[COLUMNS], e[COLUMNS];
    if (options.softcap != 0.0f || count < COLUMNS) {
      for (int64_t j = 0; j < count; ++j) copy[j] = options.capped(logits[j]);
      std::fill(copy + count, copy + COLUMNS, NONE);
      logits = copy;
    }
    const float shift = tokens.shifts[token];
    const int64_t target = targets[token] - column;
    int32_t larger = 0;
    for (int64_t j = 0; j < COLUMNS; ++j) larger |= logits[j] > shift;
    if (larger) raise(tokens.larger[token], max_of(COLUMNS, [&](int64_t j) { return logits[j]; }));
    if (tokens.above != nullptr) count_above(token, target, logits);
    for (int64_t j = 0; j < COLUMNS; ++j) e[j] = exp2_nonpositive((logits[j] - shift) * LOG2E);
    if (0 <= target && target < COLUMNS) e[target] = 0.0f;
    sums[column / COLUMNS * N + token] = sum_of(COLUMNS, [&](int64_t j) { return e[j]; });
    if (to != nullptr) store_exponentials(token, column, count, logits, e);
  }

  void store_exponentials(int64_t token, int64_t column, int64_t count, const float* logits, float* e) const {
    for (int64_t j = 0; j < COLUMNS; ++j) e[j] *= STORED_UNIT;
    if (options.softcap != 0.0f)
      for (int64_t j = 0; j < count; ++j) e[j] *= options.slope(logits[j]);
    T* at = to + token * V + column;
    count == COLUMNS && reinterpret_cast<uintptr_t>(at) % 64 == 0 ? stream(at, e) : store_row(at, e, count);
  }

  void count_above(int64_t token, int64_t target, const float* logits) const {
    const float own = tokens.logits[token];
    int64_t above = 0;
    for (int64_t j = 0; j < COLUMNS; ++j) above += j < target ? logits[j] >= own : j > target && logits[j] > own;
    if (above > 0) std::atomic_ref<int64_t>(tokens.above[token]).fetch_add(above);
  }

  static void raise(float& largest, float x) {
    std::atomic_ref<float> shared(largest);
    float seen = shared.load();
    while (seen < x && !shared.compare_exchange_weak(seen, x)) {
    }
  }
};

// Finishes rows of the gradient of `hidden`: scales them and adds the target's part.
template <typename T, typename Weight>
struct HiddenGradient {
  Head<T, Weight> head;
  const float *shares, *at_target;
  T* to;  // (N, D)

  void operator()(int64_t token, int64_t column, int64_t count, float* sums) const {
    alignas(64) typename Weight::Value scratch[COLUMNS];
    const auto row = values_of(head.weight, head.targets[token], column, count, scratch);
    const float share = shares[token], own = at_target[token];
    for (int64_t j = 0; j < count; ++j) sums[j] = share * sums[j] + own * load(row + j);
    store_row(to + token * head.D + column, sums, count);
  }
};

struct Results {
  float* losses;     // (N,), without the label smoothing term that is equal for all tokens
  float* shares;     // (N,): factor from stored exponentials to gradients of the logits
  float* at_target;  // (N,): gradient of the target's logit
};

// Calls use(i, logit) for the logits of the vocabulary entries `places` (N, K), K for each token.
template <typename T, typename Weight, typename Use>
void each_logit(int64_t N, int64_t D, int64_t K, const T* hidden, const Weight& weight, const int64_t* places,
                const Options& options, const Use& use) {
  each_tokens(N, [&](int64_t first, int64_t end) {
    Buffer<typename Weight::Value> scratch(D);
    for (int64_t i = first * K; i < end * K; ++i) {
      const T* h = hidden + i / K * D;
      const auto w = values_of(weight, places[i], 0, D, static_cast<typename Weight::Value*>(scratch));
      use(i, options.capped(sum_of(D, [&](int64_t d) { return load(h + d) * load(w + d); })));
    }
  });
}

// Computes the targets' logits and the shifts.
template <typename T, typename Weight>
void compute_shifts(const Head<T, Weight>& head, const Options& options, const Tokens& tokens) {
  each_logit(head.N, head.D, 1, head.hidden, head.weight, head.targets, options, [&](int64_t i, float logit) {
    tokens.logits[i] = logit;
    tokens.shifts[i] = logit + MARGIN;
    tokens.larger[i] = NONE;
  });
}

// Raises the shifts that were too small. Returns false if none was.
bool raise_shifts(int64_t N, const Tokens& tokens) {
  bool raised = false;
  for (int64_t i = 0; i < N; ++i) {
    if (tokens.larger[i] == NONE) continue;
    raised = true;
    tokens.shifts[i] = tokens.larger[i];
  }
  if (raised && tokens.above != nullptr) std::fill_n(tokens.above, N, 0);
  return raised;
}

void compute_results(int64_t N, int64_t tiles, const float* sums, const Tokens& tokens, const Options& options,
                     const Results& results) {
  each_tokens(N, [&](int64_t first, int64_t end) {
    float others[TOKENS] = {};
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t i = first; i < end; ++i) others[i - first] += sums[tile * N + i];
    for (int64_t i = first; i < end; ++i) {
      const float rest = others[i - first], logit = tokens.logits[i], own = std::exp(logit - tokens.shifts[i]);
      const float total = own + rest;
      const float loss = rest < own ? std::log1p(rest / own) : std::log(total) + tokens.shifts[i] - logit;
      const float lse = logit + loss, z = 2.0f * options.z_loss * lse;
      results.losses[i] = loss + options.smoothing * logit + options.z_loss * lse * lse;
      results.shares[i] = (1.0f + z) / total * (1.0f / STORED_UNIT);
      results.at_target[i] = (options.smoothing + z * own / total - rest / total) * options.slope(logit);
    }
  });
}

template <typename P, typename T, typename Weight>
void compute_losses(const Head<T, Weight>& head, const Options& options, T* exponentials, int64_t* above,
                    const Results& results) {
  const int64_t tiles = divide_up(head.V, COLUMNS);
  Buffer<float> sums(tiles * head.N), logits(head.N), shifts(head.N), larger(head.N);
  const Tokens tokens{logits, shifts, larger, above};
  const Exponentials<T> finish{head.N, head.V, head.targets, tokens, options, exponentials, sums};
  const Product<T, Weight> product{head.N,  head.V, head.D, {head.hidden, head.D, false}, head.weight.turned(),
                                   nullptr, false,  nullptr};
  Multiplication<T, Exponentials<T>, Weight, P> logits_product(product, finish);
  compute_shifts(head, options, tokens);
  logits_product.run();
  if (raise_shifts(head.N, tokens)) logits_product.run();
  compute_results(head.N, tiles, sums, tokens, options, results);
}

// Exponentials (N, V) that are packed in their place.
Operand<bfp16> packed_exponentials(const void* at, int64_t V) {
  return {static_cast<const bfp16*>(at), V * int64_t{sizeof(float) / sizeof(bfp16)}, false};
}

template <typename P, typename T, typename Weight>
void compute_hidden_gradient(const Head<T, Weight>& head, const void* exponentials, const float* shares,
                             const float* at_target, T* to) {
  const HiddenGradient<T, Weight> finish{head, shares, at_target, to};
  const auto multiply = [&]<typename E>(const Operand<E>& e) {
    const Product<E, Weight> product{head.N, head.D, head.V, e, head.weight, nullptr, false, nullptr};
    Multiplication<E, HiddenGradient<T, Weight>, Weight, P>(product, finish).run();
  };
  if constexpr (std::is_same_v<P, bfp16>)
    multiply(packed_exponentials(exponentials, head.V));
  else
    multiply(Operand<T>{static_cast<const T*>(exponentials), head.V, false});
}

// A number from 0 to 1 for each position. Those of consecutive positions are evenly distributed.
float dither(uint32_t position) {
  const uint32_t bits = position * 2654435769u >> 9 | 0x3F800000u;  // multiples of the golden ratio, modulo 1
  float value;
  std::memcpy(&value, &bits, 4);
  return value - 1.0f;
}

// Packs a row of V exponentials with one scale, and returns it. Most of them are far below the largest. Dithering keeps
// the sum of those that are smaller than a unit. Its positions begin at a number that differs between rows and steps.
float pack_row(int64_t V, uint32_t row, const float* from, bfp16* to) {
  const int32_t largest = largest_magnitude_bits(from, V);
  const BlockScale<bfp16> block(largest);
  const uint32_t start = static_cast<uint32_t>(largest) * 0x85EBCA6Bu + row * 0xC2B2AE35u;
  each_block<bfp16>(V, [&](int64_t first, int64_t count, int64_t place) {
    std::memcpy(to + place, &block.scale, sizeof(float));
    const auto mantissas = reinterpret_cast<int16_t*>(to + place + HEADER_PLACES<bfp16>);
    for (int64_t j = 0; j < count; ++j) {
      const float added = dither(start + static_cast<uint32_t>(first + j));
      mantissas[j] = static_cast<int16_t>(static_cast<int32_t>(std::floor(from[first + j] * block.inverse + added)));
    }
    if (count % 2) mantissas[count] = 0;
  });
  return block.scale;
}

// Calls compute(weight, to, P()) with typed arguments. The weight (., D) is in a block format or NOT_QUANTIZED, `to`
// points to bf16 values with BF16 and INT8_OF_BF16 and to fp32 values otherwise, like all other tensors, and P is the type
// to which matmuls pack their operands.
template <typename F>
void with_weight(int64_t precision, int64_t format, const void* weight, int64_t D, void* to, const F& compute) {
  with_precision(precision, [&]<typename T, typename P>(T, P packed) {
    with_matrix<T, Dequantized<T, P>>(format, weight, D,
                                      [&](const auto& matrix) { compute(matrix, static_cast<T*>(to), packed); });
  });
}

}  // namespace

// Computes the losses. `exponentials` (N, V) and `above` (N,), which must be zeroed by the caller, may be null. See
// Tokens and Results for the other outputs.
SANSGPU_KERNEL void cross_entropy_losses(int64_t precision, int64_t format, int64_t N, int64_t D, int64_t V,
                                         const void* hidden, const void* weight, const int64_t* targets,
                                         double smoothing, double z_loss, double softcap, void* exponentials,
                                         int64_t* above, float* losses, float* shares, float* at_target) {
  const Options options{static_cast<float>(smoothing), static_cast<float>(z_loss), static_cast<float>(softcap)};
  with_weight(precision, format, weight, D, exponentials,
              [&]<typename T, typename Weight, typename P>(const Weight& w, T* to, P) {
                const Head<T, Weight> head{N, D, V, static_cast<const T*>(hidden), w, targets};
                compute_losses<P>(head, options, to, above, {losses, shares, at_target});
              });
}

// Stores the logits of the vocabulary entries `places` (N, K), all in [0, V), in `logits` (N, K).
SANSGPU_KERNEL void head_logits_at(int64_t narrow, int64_t format, int64_t N, int64_t D, int64_t K, const void* hidden,
                                   const void* weight, const int64_t* places, double softcap, float* logits) {
  const Options options{0.0f, 0.0f, static_cast<float>(softcap)};
  with_weight(narrow ? BF16 : FP32, format, weight, D, nullptr,
              [&]<typename T, typename Weight, typename P>(const Weight& w, T*, P) {
                each_logit(N, D, K, static_cast<const T*>(hidden), w, places, options,
                           [&](int64_t i, float logit) { logits[i] = logit; });
              });
}

// Packs the rows of exponentials (N, V) fp32 in place, for gradients in INT16. Stores their scales in `scales` (N,). V
// must be at least 2.
SANSGPU_KERNEL void pack_exponentials(int64_t N, int64_t V, float* exponentials, float* scales) {
  parallel_units(N, [&](Units& drawn) {
    Buffer<float> values(V);
    for (int64_t row; drawn.draw(row);) {
      float* at = exponentials + row * V;
      std::copy_n(at, V, static_cast<float*>(values));
      scales[row] = pack_row(V, static_cast<uint32_t>(row), values, reinterpret_cast<bfp16*>(at));
    }
  });
}

// Computes the gradient of `hidden` and stores it in `to` (N, D). With INT16, the exponentials must be packed.
SANSGPU_KERNEL void cross_entropy_hidden(int64_t precision, int64_t format, int64_t N, int64_t D, int64_t V,
                                         const void* exponentials, const void* weight, const int64_t* targets,
                                         const float* shares, const float* at_target, void* to) {
  with_weight(precision, format, weight, D, to,
              [&]<typename T, typename Weight, typename P>(const Weight& w, T* out, P) {
                const Head<T, Weight> head{N, D, V, nullptr, w, targets};
                compute_hidden_gradient<P>(head, exponentials, shares, at_target, out);
              });
}

// Stores the product of the transpose of packed exponentials, without their scales, and `rows` (N, D) in `to` (V, D),
// or adds it with `add`.
SANSGPU_KERNEL void cross_entropy_weight(int64_t N, int64_t D, int64_t V, const void* exponentials, const float* rows,
                                         int64_t add, float* to) {
  const Product<bfp16, Operand<float>> product{
      V, D, N, packed_exponentials(exponentials, V).turned(), {rows, D, false}, to, add != 0, nullptr};
  const auto ignore = [](int64_t, int64_t, int64_t, const float*) {};
  Multiplication<bfp16, decltype(ignore), Operand<float>>(product, ignore).run();
}

}  // namespace sansgpu
