// One new token of each of several sequences through all layers of a decoder; kernels/decoder_step.py has the layout.
//
// B sequences, D width, H query heads, K key-value heads, d head dim, F inner width, V vocabulary, S tokens of a cache.
// Weights are packed once, because packing them for the few rows of a step takes as long as a third of its products.
// Each value is computed in the same order for any number of rows and threads.

#include "attention.h"
#include "norm.h"
#include "rotary.h"
#include "values.h"

namespace sansgpu {
namespace {

constexpr int64_t TILE = 64;        // columns of a packed tile of weights
constexpr int64_t LEAST_ROWS = 32;  // of a product of a tile, if there are too few tiles for all threads

struct Layer {
  const float* norm;
  const void* qkv;
  const float* qkv_bias;         // may be null
  const float *q_norm, *k_norm;  // (d,), null without norms of heads
  const void* out;
  const float* second_norm;
  const void* gate_up;  // tiles of the gate take turns with those of the values that it multiplies
  const void* down;
  void *keys, *values;  // (slots, K, S, d)
};

struct Sizes {
  int64_t B, D, H, K, d, F, V, S, layers;
};

template <typename T>
class Step {
 public:
  Step(const Sizes& sizes, double eps, float* x, const float* cos, const float* sin, const int64_t* positions)
      : s_(sizes),
        options_(eps, 0),
        x_(x),
        cos_(cos),
        sin_(sin),
        positions_(positions),
        width_((s_.H + 2 * s_.K) * s_.d),
        normed_(s_.B * s_.D),
        branch_(s_.B * s_.D),
        qkv_(s_.B * width_),
        attended_(s_.B * s_.H * s_.d),
        activated_(s_.B * s_.F) {}

  void run(const Layer* layers, const float* last_norm, const void* head, T* logits) {
    for (const Layer* layer = layers; layer < layers + s_.layers; ++layer) {
      add_and_normalize(layer->norm, layer > layers);
      multiply(normed_, s_.D, layer->qkv, width_, layer->qkv_bias, qkv_);
      attend(*layer);
      multiply(attended_, s_.H * s_.d, layer->out, s_.D, nullptr, branch_);
      add_and_normalize(layer->second_norm, true);
      activate(layer->gate_up);
      multiply(activated_, s_.F, layer->down, s_.D, nullptr, branch_);
    }
    add_and_normalize(last_norm, true);
    multiply(normed_, s_.D, head, s_.V, nullptr, logits);
  }

 private:
  // Adds the branch to the residual stream, and normalizes the sum.
  void add_and_normalize(const float* weight, bool add) {
    parallel_units(s_.B, [&](Units& units) {
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

  // Calls work(tile, first row, rows, sums) for parts of all rows and each of `tiles`; `sums` holds two parts of a tile.
  template <typename F>
  void each_part(int64_t tiles, const F& work) {
    int64_t rows = s_.B;
    while (rows > LEAST_ROWS && tiles * divide_up(s_.B, rows) < 4 * omp_get_max_threads()) rows = divide_up(rows, 2);
    const int64_t parts = divide_up(s_.B, rows);
    parallel_units(tiles * parts, [&](Units& units) {
      Buffer<float> sums(2 * rows * TILE);
      for (int64_t unit; units.draw(unit);) {
        const int64_t first = unit % parts * rows;
        work(unit / parts, first, std::min(rows, s_.B - first), sums);
      }
    });
  }

  // to (B, N) = a (B, terms) times a packed weight, plus `bias` if it is not null.
  void multiply(const T* a, int64_t terms, const void* weight, int64_t N, const float* bias, T* to) {
    each_part(divide_up(N, TILE), [&](int64_t tile, int64_t first, int64_t rows, float* sums) {
      product<T>(rows, TILE, terms, a + first * terms, terms, packed(weight, tile, terms), TILE, sums, TILE, false);
      const int64_t column = tile * TILE, count = std::min(TILE, N - column);
      for (int64_t i = 0; i < rows; ++i) {
        float* row = sums + i * TILE;
        if (bias != nullptr)
          for (int64_t j = 0; j < count; ++j) row[j] += bias[column + j];
        store_row(to + (first + i) * N + column, row, count);
      }
    });
  }

  // Computes silu(gate) * up, from values that are rounded as those of a linear layer.
  void activate(const void* gate_up) {
    each_part(divide_up(s_.F, TILE), [&](int64_t tile, int64_t first, int64_t rows, float* sums) {
      const T* a = normed_ + first * s_.D;
      float* up = sums + rows * TILE;
      product<T>(rows, TILE, s_.D, a, s_.D, packed(gate_up, 2 * tile, s_.D), TILE, sums, TILE, false);
      product<T>(rows, TILE, s_.D, a, s_.D, packed(gate_up, 2 * tile + 1, s_.D), TILE, up, TILE, false);
      alignas(64) T rounded[TILE];
      const int64_t column = tile * TILE, count = std::min(TILE, s_.F - column);
      for (int64_t i = 0; i < rows; ++i) {
        for (float* row : {sums + i * TILE, up + i * TILE}) {
          store_row(rounded, row, TILE);
          for (int64_t j = 0; j < TILE; ++j) row[j] = load(rounded + j);
        }
        float *x = sums + i * TILE, *y = up + i * TILE;
        for (int64_t j = 0; j < TILE; ++j) x[j] = x[j] * sigmoid(x[j]) * y[j];
        store_row(activated_ + (first + i) * s_.F + column, x, count);
      }
    });
  }

  // Stores the new keys and values, and computes the attention of each sequence to its own.
  void attend(const Layer& layer) {
    const int64_t group = s_.H / s_.K, d = s_.d;
    int64_t most = 0;
    for (int64_t b = 0; b < s_.B; ++b) most = std::max(most, positions_[b] + 1);
    const int64_t padded = round_up(most, QUERIES);
    parallel_units(s_.B * s_.K, [&](Units& units) {
      Buffer<T> q(group * d), keys(d * padded), values(padded * d), weights(group * padded);
      Buffer<float> scores(group * padded), sums(group * d), scratch(2 * d);
      for (int64_t unit; units.draw(unit);) {
        const int64_t b = unit / s_.K, kv = unit % s_.K, count = positions_[b] + 1, width = round_up(count, QUERIES);
        const T *row = qkv_ + b * width_, *new_keys = row + s_.H * d + kv * d, *new_values = new_keys + s_.K * d;
        T* own_keys = static_cast<T*>(layer.keys) + unit * s_.S * d;
        T* own_values = static_cast<T*>(layer.values) + unit * s_.S * d;
        for (int64_t g = 0; g < group; ++g)
          rotated(row + (kv * group + g) * d, layer.q_norm, b, scratch, q + g * d);
        rotated(new_keys, layer.k_norm, b, scratch, own_keys + (count - 1) * d);
        std::copy_n(new_values, d, own_values + (count - 1) * d);
        pack_transposed(own_keys, d, count, width, d, keys);
        pack(own_values, d, count, width, d, values);
        product<T>(group, width, d, q, d, keys, width, scores, width, false);
        float inverse[QUERIES];
        for (int64_t g = 0; g < group; ++g) {
          const float scale = 1.0f / std::sqrt(static_cast<float>(d));
          inverse[g] = 1.0f / softmax<T>(scores + g * width, weights + g * width, 0, count, width, scale * LOG2E).second;
        }
        product<T>(group, d, width, weights, width, values, d, sums, d, false);
        for (int64_t g = 0; g < group; ++g) {
          for (int64_t i = 0; i < d; ++i) sums[g * d + i] *= inverse[g];
          store_row(attended_ + (b * s_.H + kv * group + g) * d, sums + g * d, d);
        }
      }
    });
  }

  void rotated(const T* x, const float* weight, int64_t b, float* scratch, T* to) {
    float* out = scratch + s_.d;
    for (int64_t i = 0; i < s_.d; ++i) scratch[i] = load(x + i);
    if (weight != nullptr) {
      normalize(scratch, weight, nullptr, s_.d, options_, out);
      std::copy_n(out, s_.d, scratch);
    }
    rotate(scratch, cos_ + b * s_.d, sin_ + b * s_.d, s_.d, false, out);
    store_row(to, out, s_.d);
  }

  static const T* packed(const void* weight, int64_t tile, int64_t terms) {
    return static_cast<const T*>(weight) + tile * TILE * terms;
  }

  const Sizes s_;
  const NormOptions options_;
  float* const x_;
  const float *const cos_, *const sin_;
  const int64_t* const positions_;
  const int64_t width_;
  Buffer<T> normed_, branch_, qkv_, attended_, activated_;
};

template <typename T>
void pack_tiles(const T* weight, int64_t N, int64_t terms, int64_t step, T* to) {
  parallel_each(divide_up(N, TILE), [=](int64_t tile) {
    const int64_t rows = std::min(TILE, N - tile * TILE);
    pack_transposed(weight + tile * TILE * terms, terms, rows, TILE, terms, to + tile * step * TILE * terms);
  });
}

}  // namespace

// Packs a weight (N, terms) in tiles of 64 outputs, with room for `step` - 1 tiles of other weights after each.
SANSGPU_KERNEL void pack_step_weight(int64_t narrow, const void* weight, int64_t N, int64_t terms, int64_t step,
                                     void* to) {
  narrow ? pack_tiles(static_cast<const bf16*>(weight), N, terms, step, static_cast<bf16*>(to))
         : pack_tiles(static_cast<const float*>(weight), N, terms, step, static_cast<float*>(to));
}

// Computes logits (B, V) in the dtype of the weights. x (B, D) is the embeddings and is overwritten; cos and sin are
// (B, d), and `positions` (B,) those of the new tokens in the caches.
SANSGPU_KERNEL void decoder_step(int64_t narrow, const Sizes* sizes, double eps, const Layer* layers,
                                 const float* last_norm, const void* head, float* x, const float* cos, const float* sin,
                                 const int64_t* positions, void* logits) {
  const auto run = [&]<typename T>(T) {
    Step<T>(*sizes, eps, x, cos, sin, positions).run(layers, last_norm, head, static_cast<T*>(logits));
  };
  narrow ? run(bf16()) : run(float());
}

}  // namespace sansgpu
