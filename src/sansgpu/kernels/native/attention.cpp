// Attention over ranges of keys, forward and backward; kernels/attention.py has the reference.
//
// B batch, T time, H query heads, K key-value heads, d head dim. Each block of 64 queries is multiplied with only the
// keys that some query of the block may see. Scores stay in cache and are recomputed in the backward pass
// (FlashAttention, arXiv 2205.14135). One thread computes a whole key-value head of an example, so that the order of
// sums does not depend on the number of threads.
//
// The tokens may be nodes of graphs (kernels/distances.py). Then each score, before scaling, is multiplied with an
// entry of a table (H, M), or the entry is added to it. The head and the distance from query to key select the entry.
// Distances are computed on the fly.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

#include "nodes.h"
#include "tiles.h"

namespace sansgpu {
namespace {

constexpr int64_t QUERIES = 64;  // per block; the keys of a block are rounded to a multiple of it
constexpr int64_t KEYS = 256;    // per block of the backward pass
constexpr float LOG2E = 1.4426950408889634f;

enum Decay { NONE, TIMES, PLUS };

// A (B, T, heads, d) tensor with a contiguous last dimension and any other strides.
template <typename T>
struct View {
  T* data;
  int64_t batch, time, head;
  explicit View(const at::Tensor& t)
      : data(t.data_ptr<T>()), batch(t.stride(0)), time(t.stride(1)), head(t.stride(2)) {}
  T* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
};

struct Shape {
  int64_t B, T, S, H, K, d;  // T queries, S keys
  float scale;
  Shape(const at::Tensor& q, const at::Tensor& k)
      : B(q.size(0)), T(q.size(1)), S(k.size(1)), H(q.size(2)), K(k.size(2)), d(q.size(3)),
        scale(1.0f / std::sqrt(static_cast<float>(q.size(3)))) {}
};

// The keys [low, high) that some query of a block may see.
std::pair<int64_t, int64_t> seen(const int32_t* ranges, int64_t rows) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = 0;
  for (int64_t i = 0; i < rows; ++i)
    if (ranges[2 * i] < ranges[2 * i + 1]) {
      low = std::min(low, ranges[2 * i]);
      high = std::max(high, ranges[2 * i + 1]);
    }
  return {std::min<int64_t>(low, high), high};
}

// Checks that there is one range per query and that every key is in bounds, as the kernels index unchecked.
void check(const Shape& s, const at::Tensor& ranges) {
  TORCH_CHECK(s.H == 0 || (s.K > 0 && s.H % s.K == 0), s.K, " key-value heads do not divide ", s.H, " query heads");
  TORCH_CHECK(ranges.is_contiguous() && ranges.sizes() == at::IntArrayRef({s.B, s.T, 2}), "ranges must be (B, T, 2)");
  const int32_t* range = ranges.data_ptr<int32_t>();
  for (int64_t i = 0; i < 2 * s.B * s.T; ++i)
    TORCH_CHECK_INDEX(range[i] >= 0 && range[i] <= s.S, "key ", range[i], " is out of range");
}

// The nodes of all examples and the decay table.
struct Graph {
  const int32_t* nodes;
  const float* table;
  int64_t entries;  // table entries per head
  Graph(const std::optional<at::Tensor>& n, const std::optional<at::Tensor>& t)
      : nodes(n ? n->data_ptr<int32_t>() : nullptr),
        table(t ? t->data_ptr<float>() : nullptr),
        entries(t ? t->size(1) : 0) {}
};

// Checks that `Nodes` can represent every node and that the table has an entry for every distance.
void check(const Shape& s, const at::Tensor& ranges, const at::Tensor& nodes, const at::Tensor& table) {
  TORCH_CHECK(s.T == s.S && nodes.is_contiguous() && nodes.sizes() == ranges.sizes(), "nodes must be (B, T, 2)");
  TORCH_CHECK(table.is_contiguous() && table.dim() == 2 && table.size(0) == s.H && table.size(1) > 0,
              "the table must be (H, M)");
  const int32_t *node = nodes.data_ptr<int32_t>(), *range = ranges.data_ptr<int32_t>();
  Nodes example(s.T);
  Buffer<int32_t> distances(s.T);
  for (int64_t b = 0; b < s.B; ++b, node += 2 * s.T) {
    for (int64_t i = 0; i < s.T; ++i)
      TORCH_CHECK_INDEX(Nodes::takes(node[2 * i], node[2 * i + 1]), "node (", node[2 * i], ", ", node[2 * i + 1],
                        ") is out of range");
    example.fill(node, s.T, s.T);
    for (int64_t i = 0; i < s.T; ++i, range += 2) {
      const int64_t count = std::max(range[1] - range[0], 0);
      example.distances(i, range[0], count, std::numeric_limits<int32_t>::max(), distances);
      int32_t most = -1;
      for (int64_t j = 0; j < count; ++j) most = std::max(most, distances[j]);
      TORCH_CHECK_INDEX(most < table.size(1), "distance ", most, " is out of range of the table");
    }
  }
}

template <Decay decay>
float decayed(float score, float entry) {
  return decay == TIMES ? score * entry : score + entry;
}

// Computes the unnormalized softmax weights of a query that sees the keys [first, last) of `width`; returns the largest
// score and the sum of the weights. Overwrites the scores. Works on whole lanes; scores out of range count as -inf.
template <typename T>
std::pair<float, float> softmax(float* scores, T* weights, int64_t first, int64_t last, int64_t width, float factor) {
  if (first >= last) {
    std::fill_n(weights, width, T(0));
    return {0.0f, 0.0f};
  }
  const int64_t begin = first / LANES * LANES, end = round_up(last, LANES);
  std::fill(scores + begin, scores + first, -std::numeric_limits<float>::infinity());
  std::fill(scores + last, scores + end, -std::numeric_limits<float>::infinity());
  float* row = scores + begin;
  const float most = max_of(end - begin, [&](int64_t j) { return row[j]; }), shift = most * factor;
  const float sum = sum_of(end - begin, [&](int64_t j) { return row[j] = exp2_nonpositive(row[j] * factor - shift); });
  std::fill(weights, weights + begin, T(0));
  store_row(weights + begin, row, end - begin);
  std::fill(weights + end, weights + width, T(0));
  return {most, sum};
}

template <typename T, Decay decay>
void forward(const Shape& s, const View<T>& q, const View<T>& k, const View<T>& v, const int32_t* ranges,
             const Dropout& dropout, const Graph& graph, const View<T>& out, float* lse) {
  const int64_t padded = round_up(s.S, QUERIES), group = s.H / s.K;
  at::parallel_for(0, s.B * s.K, 1, [&](int64_t begin, int64_t end) {
    const Dropout drop = dropout;  // a local copy, because the compiler cannot rule out that writes alias `dropout`
    Buffer<T> keys(s.d * padded), values(padded * s.d), weights(QUERIES * padded);
    Buffer<float> scores(QUERIES * padded), sums(QUERIES * s.d), inverse(QUERIES), entries(padded);
    Buffer<int32_t> distances(padded);
    Nodes nodes(decay == NONE ? 0 : padded);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / s.K, kv = unit % s.K;
      pack_transposed(k.at(b, 0, kv), k.time, s.S, padded, s.d, keys);
      pack(v.at(b, 0, kv), v.time, s.S, padded, s.d, values);
      if constexpr (decay != NONE) nodes.fill(graph.nodes + 2 * b * s.T, s.T, padded);
      for (int64_t task = 0; task < group * at::divup(s.T, QUERIES); ++task) {
        const int64_t h = kv * group + task % group, start = task / group * QUERIES;
        const int64_t rows = std::min(QUERIES, s.T - start);
        const int32_t* range = ranges + 2 * (b * s.T + start);
        auto [low, high] = seen(range, rows);
        low = low / QUERIES * QUERIES;
        const int64_t width = round_up(high, QUERIES) - low;
        if (width > 0)
          product<T>(rows, width, s.d, q.at(b, start, h), q.time, keys + low * (std::is_same_v<T, bf16> ? 2 : 1),
                     padded, scores, width, false);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t first = std::max<int64_t>(range[2 * i] - low, 0), last = range[2 * i + 1] - low;
          float* row = scores + i * width;
          T* weight = weights + i * width;
          if (decay != NONE && first < last) {
            const int64_t from = first / LANES * LANES, count = round_up(last, LANES) - from;
            nodes.distances(start + i, low + from, count, graph.entries - 1, distances);
            look_up(graph.table + h * graph.entries, distances, count, entries);
            for (int64_t j = 0; j < count; ++j) row[from + j] = decayed<decay>(row[from + j], entries[j]);
          }
          const auto [most, sum] = softmax<T>(row, weight, first, last, width, s.scale * LOG2E);
          if (drop.threshold) {
            const uint32_t key = drop.row(b * s.H + h, start + i);
            for (int64_t j = first; j < last; ++j) row[j] *= drop.factor(key, low + j);
            store_row(weight + first, row + first, last - first);
          }
          inverse[i] = last > first ? 1.0f / sum : 0.0f;
          lse[(b * s.H + h) * s.T + start + i] = last > first ? most * s.scale + std::log(sum) : 0.0f;
        }
        if (width > 0)
          product<T>(rows, s.d, width, weights, width, values + low * s.d, s.d, sums, s.d, false);
        else
          std::fill_n(static_cast<float*>(sums), rows * s.d, 0.0f);
        for (int64_t i = 0; i < rows; ++i) {
          float* row = sums + i * s.d;
          for (int64_t c = 0; c < s.d; ++c) row[c] *= inverse[i];
          store_row(out.at(b, start + i, h), row, s.d);
        }
      }
    }
    at::native::cpublas::brgemm_release(std::is_same_v<T, bf16>);
  });
}

// The inputs of a block of queries in the backward pass, packed for each of its four matmuls.
template <typename T>
struct QueryBlock {
  Buffer<T> q, q_transposed, grad, grad_transposed;
  float lse[QUERIES], dot[QUERIES];
  int32_t first[QUERIES], last[QUERIES];
  uint32_t key[QUERIES];
  explicit QueryBlock(int64_t d) : q(QUERIES * d), q_transposed(d * QUERIES), grad(QUERIES * d), grad_transposed(d * QUERIES) {}

  void fill(const Shape& s, const View<T>& queries, const View<T>& out, const View<T>& grad_out, const float* row_lse,
            const int32_t* range, const Dropout& dropout, int64_t b, int64_t h, int64_t start, int64_t rows) {
    pack(queries.at(b, start, h), queries.time, rows, QUERIES, s.d, q);
    pack_transposed(queries.at(b, start, h), queries.time, rows, QUERIES, s.d, q_transposed);
    pack(grad_out.at(b, start, h), grad_out.time, rows, QUERIES, s.d, grad);
    pack_transposed(grad_out.at(b, start, h), grad_out.time, rows, QUERIES, s.d, grad_transposed);
    for (int64_t i = 0; i < QUERIES; ++i) {
      first[i] = i < rows ? range[2 * i] : 0;
      last[i] = i < rows ? range[2 * i + 1] : 0;
      lse[i] = i < rows ? row_lse[i] * LOG2E : 0.0f;
      key[i] = dropout.row(b * s.H + h, start + i);
      if (i < rows) {
        const T *o = out.at(b, start + i, h), *g = grad_out.at(b, start + i, h);
        dot[i] = sum_of(s.d, [&](int64_t c) { return load(o + c) * load(g + c); });
      } else {
        dot[i] = 0.0f;
      }
    }
  }
};

// The decay of a block: its nodes and first query, the head's table entries and their gradients.
struct DecayBlock {
  const Nodes& nodes;
  int64_t start, entries;
  const float* table;
  SumsByDistance<QUERIES>& table_grad;
};

// Computes weights and score gradients of a (keys, QUERIES) block from its scores and weight gradients.
template <typename T, Decay decay>
void weights_and_gradients(const QueryBlock<T>& block, const DecayBlock& with, const float* scores,
                           const float* weight_grads, int64_t low, int64_t count, int64_t padded, float scale,
                           Dropout dropout, T* weights, T* score_grads) {
  const float factor = scale * LOG2E;
  for (int64_t j = 0; j < count; ++j) {
    const int32_t key = static_cast<int32_t>(low + j);
    const float *score = scores + j * QUERIES, *weight_grad = weight_grads + j * QUERIES;
    float p[QUERIES], kept[QUERIES], grad[QUERIES], entries[QUERIES];
    int32_t distances[QUERIES];
    if constexpr (decay == NONE) {
      for (int64_t i = 0; i < QUERIES; ++i) p[i] = exp2_nonpositive(score[i] * factor - block.lse[i]);
    } else {
      with.nodes.distances(key, with.start, QUERIES, with.entries - 1, distances);
      look_up(with.table, distances, QUERIES, entries);
      for (int64_t i = 0; i < QUERIES; ++i)
        p[i] = exp2_nonpositive(decayed<decay>(score[i], entries[i]) * factor - block.lse[i]);
    }
    for (int64_t i = 0; i < QUERIES; ++i) p[i] = (block.first[i] <= key) & (key < block.last[i]) ? p[i] : 0.0f;
    if (dropout.threshold) {
      for (int64_t i = 0; i < QUERIES; ++i) kept[i] = dropout.factor(block.key[i], key);
      for (int64_t i = 0; i < QUERIES; ++i) grad[i] = p[i] * (weight_grad[i] * kept[i] - block.dot[i]) * scale;
      for (int64_t i = 0; i < QUERIES; ++i) p[i] *= kept[i];
    } else {
      for (int64_t i = 0; i < QUERIES; ++i) grad[i] = p[i] * (weight_grad[i] - block.dot[i]) * scale;
    }
    if constexpr (decay != NONE) {
      float by_entry[QUERIES];
      for (int64_t i = 0; i < QUERIES; ++i) by_entry[i] = decay == TIMES ? grad[i] * score[i] : grad[i];
      if constexpr (decay == TIMES)
        for (int64_t i = 0; i < QUERIES; ++i) grad[i] *= entries[i];
      with.table_grad.add(distances, by_entry);
    }
    store_row(weights + j * QUERIES, p, QUERIES);
    store_row(score_grads + j * QUERIES, grad, QUERIES);
  }
  std::fill(score_grads + count * QUERIES, score_grads + padded * QUERIES, T(0));
}

template <typename T, Decay decay>
void backward(const Shape& s, const View<T>& q, const View<T>& k, const View<T>& v, const View<T>& out,
              const View<T>& grad_out, const int32_t* ranges, const float* lse, const Dropout& dropout,
              const Graph& graph, const View<T>& q_grad, const View<T>& k_grad, const View<T>& v_grad,
              float* table_grads) {
  const int64_t padded = round_up(s.S, QUERIES), group = s.H / s.K;
  at::parallel_for(0, s.B * s.K, 1, [&](int64_t begin, int64_t end) {
    Buffer<T> keys_transposed(s.d * padded), weights(KEYS * QUERIES), score_grads(KEYS * QUERIES), packed(KEYS * QUERIES);
    Buffer<float> scores(KEYS * QUERIES), weight_grads(KEYS * QUERIES), dq(s.d * QUERIES), dq_rows(s.d * QUERIES),
        dk(s.S * s.d), dv(s.S * s.d);
    SumsByDistance<QUERIES> table_grad(graph.entries);
    Nodes nodes(decay == NONE ? 0 : padded);
    QueryBlock<T> block(s.d);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t b = unit / s.K, kv = unit % s.K;
      transpose(bits(k.at(b, 0, kv)), k.time, s.S, s.d, bits(keys_transposed), padded);
      for (int64_t c = 0; c < s.d; ++c) std::fill(keys_transposed + c * padded + s.S, keys_transposed + (c + 1) * padded, T(0));
      std::fill_n(static_cast<float*>(dk), s.S * s.d, 0.0f);
      std::fill_n(static_cast<float*>(dv), s.S * s.d, 0.0f);
      if constexpr (decay != NONE) nodes.fill(graph.nodes + 2 * b * s.T, s.T, padded);
      for (int64_t task = 0; task < group * at::divup(s.T, QUERIES); ++task) {
        const int64_t h = kv * group + task % group, start = task / group * QUERIES;
        const int64_t rows = std::min(QUERIES, s.T - start);
        const int32_t* range = ranges + 2 * (b * s.T + start);
        block.fill(s, q, out, grad_out, lse + (b * s.H + h) * s.T + start, range, dropout, b, h, start, rows);
        const DecayBlock with{nodes, start, graph.entries, graph.table + h * graph.entries,
                              table_grad};
        std::fill_n(static_cast<float*>(dq), s.d * QUERIES, 0.0f);
        const auto [first, high] = seen(range, rows);
        for (int64_t low = first / QUERIES * QUERIES; low < high; low += KEYS) {
          const int64_t whole = std::min(KEYS, round_up(high, QUERIES) - low), count = std::min(whole, s.S - low);
          product<T>(count, QUERIES, s.d, k.at(b, low, kv), k.time, block.q_transposed, QUERIES, scores, QUERIES, false);
          product<T>(count, QUERIES, s.d, v.at(b, low, kv), v.time, block.grad_transposed, QUERIES, weight_grads, QUERIES,
                     false);
          weights_and_gradients<T, decay>(block, with, scores, weight_grads, low, count, whole, s.scale, dropout, weights,
                                          score_grads);
          product<T>(count, s.d, QUERIES, weights, QUERIES, block.grad, s.d, dv + low * s.d, s.d, true);
          product<T>(count, s.d, QUERIES, score_grads, QUERIES, block.q, s.d, dk + low * s.d, s.d, true);
          pack(score_grads, QUERIES, whole, whole, QUERIES, packed);
          product<T>(s.d, QUERIES, whole, keys_transposed + low, padded, packed, QUERIES, dq, QUERIES, true);
        }
        transpose<float>(dq, QUERIES, s.d, QUERIES, dq_rows, s.d);
        for (int64_t i = 0; i < rows; ++i) store_row(q_grad.at(b, start + i, h), dq_rows + i * s.d, s.d);
        if constexpr (decay != NONE) table_grad.add_to(table_grads + (b * s.H + h) * graph.entries);
      }
      for (int64_t j = 0; j < s.S; ++j) {
        store_row(k_grad.at(b, j, kv), dk + j * s.d, s.d);
        store_row(v_grad.at(b, j, kv), dv + j * s.d, s.d);
      }
    }
    at::native::cpublas::brgemm_release(std::is_same_v<T, bf16>);
  });
}

// Sums (B, H, M) to (H, M) in a fixed order.
at::Tensor sum_of_examples(const at::Tensor& parts) {
  at::Tensor sum = at::zeros({parts.size(1), parts.size(2)}, parts.options());
  const float* part = parts.data_ptr<float>();
  float* total = sum.data_ptr<float>();
  for (int64_t b = 0; b < parts.size(0); ++b)
    for (int64_t i = 0; i < sum.numel(); ++i) total[i] += *part++;
  return sum;
}

template <typename T, Decay decay>
struct Kind {};

// Calls run(Kind) for the dtype of q and the kind of decay.
template <typename F>
void dispatch(const at::Tensor& q, bool decayed, bool added, const F& run) {
  const auto of = [&]<typename T>(T) {
    !decayed ? run(Kind<T, NONE>()) : added ? run(Kind<T, PLUS>()) : run(Kind<T, TIMES>());
  };
  q.scalar_type() == at::kBFloat16 ? of(bf16()) : of(float());
}

std::tuple<at::Tensor, at::Tensor> attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                     const at::Tensor& ranges, double dropout, const at::Tensor& seed,
                                                     const std::optional<at::Tensor>& nodes,
                                                     const std::optional<at::Tensor>& table, bool added) {
  const Shape s(q, k);
  check(s, ranges);
  if (nodes) check(s, ranges, *nodes, table.value());
  at::Tensor out = at::empty({s.B, s.T, s.H, s.d}, q.options());
  at::Tensor lse = at::empty({s.B, s.H, s.T}, q.options().dtype(at::kFloat));
  dispatch(q, nodes.has_value(), added, [&]<typename T, Decay decay>(Kind<T, decay>) {
    forward<T, decay>(s, View<T>(q), View<T>(k), View<T>(v), ranges.data_ptr<int32_t>(),
                      Dropout(dropout, *seed.data_ptr<int64_t>()), Graph(nodes, table), View<T>(out),
                      lse.data_ptr<float>());
  });
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const at::Tensor& ranges, double dropout, const at::Tensor& seed,
    const std::optional<at::Tensor>& nodes, const std::optional<at::Tensor>& table, bool added) {
  const Shape s(q, k);
  const Graph graph(nodes, table);
  // Gradients get the strides of their inputs, so that autograd need not copy them.
  at::Tensor q_grad = at::empty_like(q), k_grad = at::empty_like(k), v_grad = at::empty_like(v);
  at::Tensor table_grads = at::zeros({s.B, graph.entries ? s.H : 0, graph.entries}, lse.options());
  dispatch(q, nodes.has_value(), added, [&]<typename T, Decay decay>(Kind<T, decay>) {
    backward<T, decay>(s, View<T>(q), View<T>(k), View<T>(v), View<T>(out), View<T>(grad_out),
                       ranges.data_ptr<int32_t>(), lse.data_ptr<float>(), Dropout(dropout, *seed.data_ptr<int64_t>()),
                       graph, View<T>(q_grad), View<T>(k_grad), View<T>(v_grad), table_grads.data_ptr<float>());
  });
  return {q_grad, k_grad, v_grad, sum_of_examples(table_grads)};
}

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) {
  library.impl("attention_forward", &attention_forward);
  library.impl("attention_backward", &attention_backward);
}

}  // namespace sansgpu
