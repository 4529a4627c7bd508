// One decoding step: computes new tokens of several sequences through all layers of a decoder.
// kernels/decoder_step.py describes the layout.
//
// N new tokens, of which L get logits, D width, H query heads, K key-value heads, d head dim, F feed-forward width, V
// vocabulary, S tokens per KV cache. Plain weights are packed once, because packing them in every step would take a
// third of the time of its matmuls. Packed weights may be integers of 8 bits (block floats) or the codes of quantized
// weights (code_tiles.h). Quantized weights that are not packed, because memory would not hold the copy, are
// dequantized in every step. Each value is computed in the same order for any number of rows and threads.

#include <algorithm>
#include <vector>

#include "attention.h"
#include "code_tiles.h"
#include "norm.h"
#include "packed_cache.h"
#include "quantized_rows.h"
#include "rotary.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t TILE = STEP_TILE;
constexpr int64_t WIDENED = 512;    // terms of a quantized tile that are dequantized at once
constexpr int64_t MOST_TOKENS_OF_RUN = 8;  // tokens of a sequence whose attention a thread computes together
constexpr int64_t TOGETHER = std::extent_v<decltype(StepLayer::qkv)>;  // maximum weights in one parallel region
static_assert(TILE % PANEL<float> == 0 && TILE % PANEL<bf16> == 0, "the panels of a tile are whole");
static_assert(WIDENED % GROUP == 0, "quantized values are widened in groups");
static_assert(std::extent_v<decltype(StepLayer::gate_up)> <= TOGETHER, "no call multiplies more weights");

// Tokens that follow each other in a sequence.
struct Run {
  int64_t first, count;
};

template <typename T>
class Step {
 public:
  Step(const StepSizes& sizes, double eps, float* x, const float* cos, const float* sin, const int64_t* slots,
       const int64_t* positions)
      : s_(sizes),
        rows_(sizes.N),
        options_(eps, 0),
        x_(x),
        cos_(cos),
        sin_(sin),
        slots_(slots),
        positions_(positions),
        width_((s_.H + 2 * s_.K) * s_.d),
        normed_(s_.N * s_.D),
        branch_(s_.N * s_.D),
        qkv_(s_.N * width_),
        attended_(s_.N * s_.H * s_.d),
        activated_(s_.N * s_.F) {
    for (int64_t n = 0; n < s_.N; ++n)
      if (n > 0 && slots[n] == slots[n - 1] && runs_.back().count < MOST_TOKENS_OF_RUN)
        ++runs_.back().count;
      else
        runs_.push_back({n, 1});
  }

  void run(const StepLayer* layers, const float* last_norm, const StepWeight& head, const int64_t* chosen, T* logits) {
    for (const StepLayer* layer = layers; layer < layers + s_.layers; ++layer) {
      add_and_normalize(layer->norm, layer > layers);
      multiply(normed_, s_.D, layer->qkv, TOGETHER, qkv_);
      attend(*layer);
      multiply(attended_, s_.H * s_.d, &layer->out, 1, branch_);
      add_and_normalize(layer->second_norm, true);
      activate(layer->gate_up);
      multiply(activated_, s_.F, &layer->down, 1, branch_);
    }
    add_and_normalize(last_norm, true);
    for (int64_t i = 0; i < s_.L; ++i)
      if (chosen[i] > i) std::copy_n(normed_ + chosen[i] * s_.D, s_.D, normed_ + i * s_.D);
    rows_ = s_.L;
    multiply(normed_, s_.D, &head, 1, logits);
  }

 private:
  // Adds the branch to the residual stream if `add`, and normalizes the sum.
  void add_and_normalize(const float* weight, bool add) {
    parallel_units(rows_, [&](Units& units) {
      Buffer<float> normed(s_.D);
      for (int64_t row; units.draw(row);) {
        float* x = x_ + row * s_.D;
        const T* branch = branch_ + row * s_.D;
        if (add)
          for (int64_t i = 0; i < s_.D; ++i) x[i] += load(branch + i);
        normalize(x, weight, nullptr, s_.D, options_, normed);
        store_row(normed_ + row * s_.D, normed, s_.D);
      }
    });
  }

  // Scratch memory of a thread for a tile: two buffers for sums, and one for dequantized weights.
  struct Space {
    Buffer<float> sums;
    Buffer<T> widened;
    explicit Space(int64_t rows) : sums(2 * rows * TILE), widened(WIDENED * TILE) {}
  };

  // Calls work(tile, first row, rows, space) for each of `tiles` tiles and each part of the rows.
  template <typename F>
  void each_part(int64_t tiles, const F& work) {
    int64_t rows = std::min(rows_, MOST_ROWS);
    while (rows > LEAST_ROWS && tiles * divide_up(rows_, rows) < 4 * omp_get_max_threads()) rows = divide_up(rows, 2);
    const int64_t parts = divide_up(rows_, rows);
    parallel_units(tiles * parts, [&](Units& units) {
      Space space(rows);
      for (int64_t unit; units.draw(unit);) {
        const int64_t first = unit % parts * rows;
        work(unit / parts, first, std::min(rows, rows_ - first), space);
      }
    });
  }

  // The products of all rows with the adapters' matrices A, side by side.
  struct LowRank {
    int64_t ld = 0;
    Buffer<T> values;
    LowRank(int64_t rows, const StepWeight* weights, int64_t count)
        : ld(total(weights, count)), values(rows * ld + 1) {}

    static int64_t total(const StepWeight* weights, int64_t count) {
      int64_t rank = 0;
      for (const StepWeight* weight = weights; weight < weights + count; ++weight) rank += weight->rank;
      return rank;
    }
  };

  LowRank low_rank(const T* a, int64_t terms, const StepWeight* weights, int64_t count) {
    LowRank low(rows_, weights, count);
    StepWeight firsts[TOGETHER];
    for (int64_t i = 0; i < count; ++i)
      firsts[i] = {weights[i].first, NOT_QUANTIZED, weights[i].rank, nullptr, 0, nullptr, nullptr};
    if (low.ld > 0) multiply(a, terms, firsts, count, low.values);
    return low;
  }

  // The input (rows, terms) of weights, and its rows as the integers that are multiplied with packed weights: as block
  // floats, for INT8_TILES, or as in code_tiles.h. With two parts, another row follows each row of block floats: its
  // rounding errors.
  struct Rows {
    const T* values;
    int64_t terms, ld, parts;
    Buffer<bfp8> packed;
    Buffer<uint8_t> integers;

    Rows(const T* values, int64_t rows, int64_t parts, int64_t terms, const StepWeight* weights, int64_t count)
        : values(values),
          terms(terms),
          ld(padded<bfp8>(terms)),
          parts(parts),
          packed(is_packed(weights, count) ? rows * parts * ld : 1),
          integers(has_codes(weights, count) ? rows * integer_bytes() : 1) {
      if (has_codes(weights, count))
        each_few(rows, [&](int64_t row) {
          pack_integer_row(parts, values + row * terms, terms, integers + row * integer_bytes());
        });
      if (!is_packed(weights, count)) return;
      each_few(rows, [&](int64_t row) {
        Buffer<float> rest(terms);
        for (int64_t i = 0; i < terms; ++i) rest[i] = load(values + row * terms + i);
        rotate_row(rest, terms);
        for (int64_t part = 0; part < parts; ++part) {
          bfp8* to = packed + (row * parts + part) * ld;
          pack_rotated_row(rest, terms, to);
          if (part + 1 < parts) subtract_row(to, terms, rest);
        }
      });
    }

    int64_t integer_bytes() const { return integer_row_bytes(parts, terms); }
    const bfp8* packed_row(int64_t row) const { return packed + row * parts * ld; }

   private:
    static bool has_codes(const StepWeight* weights, int64_t count) {
      return std::any_of(weights, weights + count, [](const StepWeight& one) { return one.format >= CODE_TILES; });
    }

    // Calls pack(row) for each row; a thread takes a few at a time.
    template <typename F>
    static void each_few(int64_t rows, const F& pack) {
      constexpr int64_t FEW = 8;
      parallel_each(divide_up(rows, FEW), [&](int64_t unit) {
        for (int64_t row = unit * FEW; row < std::min(rows, (unit + 1) * FEW); ++row) pack(row);
      });
    }

    static bool is_packed(const StepWeight* weights, int64_t count) {
      return std::any_of(weights, weights + count, [](const StepWeight& one) { return one.format == INT8_TILES; });
    }
  };

  // Multiplies a (rows, terms) with `count` weights. Stores their outputs side by side in `to` (rows, outputs of all
  // weights).
  void multiply(const T* a, int64_t terms, const StepWeight* weights, int64_t count, T* to) {
    const LowRank low = LowRank::total(weights, count) > 0 ? low_rank(a, terms, weights, count) : LowRank(0, weights, 0);
    int64_t ld = 0, tiles = 0;
    for (int64_t i = 0; i < count; ++i) ld += weights[i].N, tiles += divide_up(weights[i].N, TILE);
    const Rows inputs(a, rows_, s_.parts, terms, weights, count);
    each_part(tiles, [&](int64_t tile, int64_t first, int64_t rows, Space& space) {
      const StepWeight* weight = weights;
      int64_t column = 0, rank = 0;
      for (; tile >= divide_up(weight->N, TILE); ++weight) {
        tile -= divide_up(weight->N, TILE);
        column += weight->N;
        rank += weight->rank;
      }
      const T* own_low = low.values + first * low.ld + rank;
      multiply_tile(*weight, tile, inputs, first, rows, own_low, low.ld, space.sums, space.widened);
      const int64_t outputs = std::min(TILE, weight->N - tile * TILE);
      for (int64_t i = 0; i < rows; ++i)
        store_row(to + (first + i) * ld + column + tile * TILE, space.sums + i * TILE, outputs);
    });
  }

  // Computes sums (rows, TILE) = `rows` rows of inputs times a tile of a weight, plus the bias and the adapter's
  // product.
  static void multiply_tile(const StepWeight& weight, int64_t tile, const Rows& inputs, int64_t first, int64_t rows,
                            const T* low, int64_t ld_low, float* sums, T* widened) {
    const int64_t outputs = std::min(TILE, weight.N - tile * TILE), terms = inputs.terms;
    const T* a = inputs.values + first * terms;
    if (weight.format == INT8_TILES)
      multiply_integers(static_cast<const bfp8*>(weight.data) + tile * TILE * inputs.ld, inputs, first, rows, sums);
    else if (weight.format >= CODE_TILES)
      multiply_codes(weight, tile, inputs, first, rows, sums);
    else if (weight.format == NOT_QUANTIZED)
      product<T>(rows, TILE, terms, a, terms, packed(weight.data, tile, terms), TILE, sums, TILE, false);
    else
      multiply_quantized(weight, tile * TILE, outputs, rows, a, terms, sums, widened);
    if (weight.rank > 0)
      product<T>(rows, TILE, weight.rank, low, ld_low, packed(weight.second, tile, weight.rank), TILE, sums, TILE, true);
    if (weight.bias != nullptr)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < outputs; ++j) sums[i * TILE + j] += weight.bias[tile * TILE + j];
  }

  static void multiply_integers(const bfp8* tile, const Rows& inputs, int64_t first, int64_t rows, float* sums) {
    const int64_t ld = inputs.ld;
    for (int64_t part = 0; part < inputs.parts; ++part)
      for (int64_t j = 0; j < TILE; j += PANEL<bfp8>)
        product<bfp8>(rows, PANEL<bfp8>, ld, inputs.packed_row(first) + part * ld, inputs.parts * ld, tile + j * ld,
                      PANEL<bfp8>, sums + j, TILE, part > 0);
  }

  static void multiply_codes(const StepWeight& weight, int64_t tile, const Rows& inputs, int64_t first, int64_t rows,
                             float* sums) {
    const int64_t format = weight.format - CODE_TILES;
    const uint8_t* at = static_cast<const uint8_t*>(weight.data) + tile * code_tile_bytes(format, inputs.terms);
    multiply_code_tile(format, inputs.parts, inputs.terms, at, rows, inputs.integers + first * inputs.integer_bytes(),
                       sums);
  }

  static void multiply_quantized(const StepWeight& weight, int64_t column, int64_t outputs, int64_t rows, const T* a,
                                 int64_t terms, float* sums, T* widened) {
    const QuantizedRows<T> matrix = QuantizedRows<T>(weight.format, weight.data, terms).turned();
    for (int64_t k = 0; k < terms; k += WIDENED) {
      const int64_t depth = std::min(WIDENED, terms - k);
      pack_columns(matrix.from(k, column), outputs, depth, widened);
      for (int64_t j = 0; j < outputs; j += PANEL<T>) {
        const int64_t width = std::min(PANEL<T>, outputs - j);
        product<T>(rows, width, depth, a + k, terms, widened + j * depth, width, sums + j, TILE, k > 0);
      }
    }
  }

  // Computes silu(gate) * up. Rounds gate and up as the output of a linear layer first.
  void activate(const StepWeight* gate_up) {
    const LowRank low = low_rank(normed_, s_.D, gate_up, 2);
    const Rows inputs(normed_, rows_, s_.parts, s_.D, gate_up, 2);
    each_part(divide_up(s_.F, TILE), [&](int64_t tile, int64_t first, int64_t rows, Space& space) {
      float *gate = space.sums, *up = gate + rows * TILE;
      for (int64_t i = 0; i < 2; ++i) {
        const T* own_low = low.values + first * low.ld + i * gate_up->rank;
        float* sums = i == 0 ? gate : up;
        multiply_tile(gate_up[i], tile, inputs, first, rows, own_low, low.ld, sums, space.widened);
      }
      alignas(64) T rounded[TILE];
      const int64_t column = tile * TILE, count = std::min(TILE, s_.F - column);
      for (int64_t i = 0; i < rows; ++i) {
        float *x = gate + i * TILE, *y = up + i * TILE;
        for (float* row : {x, y}) {
          store_row(rounded, row, count);
          for (int64_t j = 0; j < count; ++j) row[j] = load(rounded + j);
        }
        for (int64_t j = 0; j < count; ++j) x[j] = x[j] * sigmoid(x[j]) * y[j];
        store_row(activated_ + (first + i) * s_.F + column, x, count);
      }
    });
  }

  // Stores the new keys and values, and computes attention over the caches.
  void attend(const StepLayer& layer) {
    if (runs_.size() < static_cast<size_t>(s_.N))  // tokens attend to others of this step
      parallel_each(s_.K, [&](int64_t kv) {
        for (int64_t n = 0; n < s_.N; ++n) store_token(layer, n, kv);
      });
    const int64_t rows = MOST_TOKENS_OF_RUN * s_.H / s_.K, longest = *std::max_element(positions_, positions_ + s_.N) + 1;
    parallel_units(static_cast<int64_t>(runs_.size()) * s_.K, [&](Units& units) {
      Attending space(rows, round_up(longest, CACHE_BLOCK), s_.d);
      for (int64_t unit; units.draw(unit);) attend(layer, runs_[unit / s_.K], unit % s_.K, space);
    });
  }

  // Scratch memory of a thread for attention: (rows, d), (rows, width) and (rows,).
  struct Attending {
    Buffer<T> q, weights;
    Buffer<float> scores, sums, rotated, inverse;
    Attending(int64_t rows, int64_t width, int64_t d)
        : q(rows * d), weights(rows * width), scores(rows * width), sums(rows * d), rotated(2 * d), inverse(rows) {}
  };

  // Computes the attention of the query heads of a run that share a key-value head.
  void attend(const StepLayer& layer, const Run& run, int64_t kv, Attending& space) {
    const int64_t group = s_.H / s_.K, d = s_.d, rows = run.count * group, last = run.first + run.count - 1;
    const int64_t blocks = divide_up(positions_[last] + 1, CACHE_BLOCK), width = blocks * CACHE_BLOCK;
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    const PackedCache<T> cache = cache_of(layer, run.first, kv);
    const auto token = [&](int64_t row) { return run.first + row / group; };
    const auto head = [&](int64_t row) { return kv * group + row % group; };
    for (int64_t row = 0; row < rows; ++row)
      rotated(qkv_ + token(row) * width_ + head(row) * d, layer.q_norm, token(row), space.rotated, space.q + row * d);
    if (runs_.size() == static_cast<size_t>(s_.N)) store_token(layer, run.first, kv);
    for (int64_t block = 0; block < blocks; ++block)
      product<T>(rows, CACHE_BLOCK, d, space.q, d, cache.key_block(block), CACHE_BLOCK,
                 space.scores + block * CACHE_BLOCK, width, false);
    for (int64_t row = 0; row < rows; ++row)
      space.inverse[row] = 1.0f / softmax<T>(space.scores + row * width, space.weights + row * width, 0,
                                             positions_[token(row)] + 1, width, scale * LOG2E).second;
    product<T>(rows, d, round_up(positions_[last] + 1, LANES), space.weights, width, cache.values, d, space.sums, d,
               false);
    for (int64_t row = 0; row < rows; ++row) {
      float* sums = space.sums + row * d;
      for (int64_t i = 0; i < d; ++i) sums[i] *= space.inverse[row];
      store_row(attended_ + (token(row) * s_.H + head(row)) * d, sums, d);
    }
  }

  PackedCache<T> cache_of(const StepLayer& layer, int64_t n, int64_t kv) const {
    return PackedCache<T>(layer.keys, layer.values, slots_[n] * s_.K + kv, s_.S, s_.d);
  }

  // Stores the key and value of a token and a key-value head.
  void store_token(const StepLayer& layer, int64_t n, int64_t kv) {
    const T *key = qkv_ + n * width_ + (s_.H + kv) * s_.d, *value = key + s_.K * s_.d;
    Buffer<float> scratch(2 * s_.d);
    Buffer<T> to(s_.d);
    rotated(key, layer.k_norm, n, scratch, to);
    cache_of(layer, n, kv).store(positions_[n], to, value);
  }

  void rotated(const T* x, const float* weight, int64_t n, float* scratch, T* to) {
    float* out = scratch + s_.d;
    for (int64_t i = 0; i < s_.d; ++i) scratch[i] = load(x + i);
    if (weight != nullptr) {
      normalize(scratch, weight, nullptr, s_.d, options_, out);
      std::copy_n(out, s_.d, scratch);
    }
    rotate(scratch, cos_ + n * s_.d, sin_ + n * s_.d, s_.d, false, out);
    store_row(to, out, s_.d);
  }

  static const T* packed(const void* weight, int64_t tile, int64_t terms) {
    return static_cast<const T*>(weight) + tile * TILE * terms;
  }

  const StepSizes s_;
  int64_t rows_;  // rows of the inputs of weights: N, and L for the head
  const NormOptions options_;
  float* const x_;
  const float *const cos_, *const sin_;
  const int64_t *const slots_, *const positions_;
  const int64_t width_;
  Buffer<T> normed_, branch_, qkv_, attended_, activated_;
  std::vector<Run> runs_;
};

}  // namespace

// Computes logits (L, V) of the tokens `chosen` (L,), in ascending order. Logits, packed weights and caches are bf16 if
// `narrow`, otherwise fp32. x (N, D) has the embeddings and is overwritten; cos and sin are (N, d); `slots` and
// `positions` (N,) are the places of the new tokens in the caches. The tokens of a sequence must follow each other.
SANSGPU_KERNEL void decoder_step(int64_t narrow, const StepSizes* sizes, double eps, const StepLayer* layers,
                                 const float* last_norm, const StepWeight* head, float* x, const float* cos,
                                 const float* sin, const int64_t* slots, const int64_t* positions,
                                 const int64_t* chosen, void* logits) {
  const auto run = [&]<typename T>(T) {
    Step<T>(*sizes, eps, x, cos, sin, slots, positions).run(layers, last_norm, *head, chosen, static_cast<T*>(logits));
  };
  narrow ? run(bf16()) : run(float());
}

}  // namespace sansgpu
