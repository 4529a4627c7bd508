// Backward pass of attention; see attention.h.
//
// A unit of work is a block of keys of one query head. It owns the gradients of its keys and values; gradients of
// queries are sums over blocks of keys, to which the units add in order.

#include "attention.h"

namespace sansgpu {
namespace {

constexpr int64_t KEYS = 256;  // per block of keys

int64_t key_blocks(const Shape& s) { return std::max<int64_t>(1, divide_up(s.S, KEYS)); }  // 1 without keys

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

// Sums the gradients of a key-value head, parts (B, H, S, d), over its query heads.
template <typename T>
void add_heads(const Shape& s, const float* parts, const View<T>& grad) {
  const int64_t group = s.H / s.K, blocks = divide_up(s.S, QUERIES), size = s.S * s.d;
  parallel_units(s.B * s.K * blocks, [&](Units& units) {
    Buffer<float> sum(s.d);
    for (int64_t unit; units.draw(unit);) {
      const int64_t b = unit / blocks / s.K, kv = unit / blocks % s.K, start = unit % blocks * QUERIES;
      for (int64_t j = start; j < std::min(start + QUERIES, s.S); ++j) {
        const float* part = parts + (b * s.H + kv * group) * size + j * s.d;
        std::copy_n(part, s.d, static_cast<float*>(sum));
        for (int64_t h = 1; h < group; ++h)
          for (int64_t c = 0; c < s.d; ++c) sum[c] += part[h * size + c];
        store_row(grad.at(b, j, kv), sum, s.d);
      }
    }
  });
}

// Sums parts (count, size) to `total` (size,) in order.
void sum_parts(const float* parts, int64_t count, int64_t size, float* total) {
  std::fill_n(total, size, 0.0f);
  for (int64_t part = 0; part < count; ++part)
    for (int64_t i = 0; i < size; ++i) total[i] += parts[part * size + i];
}

template <typename T, Decay decay>
void backward(const Shape& s, const View<T>& q, const View<T>& k, const View<T>& v, const View<T>& out,
              const View<T>& grad_out, const int32_t* ranges, const float* lse, const Dropout& dropout,
              const Graph& graph, const View<T>& q_grad, const View<T>& k_grad, const View<T>& v_grad,
              float* table_grad) {
  const int64_t group = s.H / s.K, heads = s.B * s.H, blocks = divide_up(s.T, QUERIES), chunks = key_blocks(s);
  const int64_t tile = QUERIES * s.d;
  Buffer<float> shared_dq(chunks > 1 ? heads * blocks * tile : 1);  // sums over blocks of keys, transposed
  Turns turns(heads * blocks);
  Buffer<float> table_grads(chunks * heads * graph.entries);
  Buffer<float> head_dk(group > 1 ? heads * s.S * s.d : 1), head_dv(group > 1 ? heads * s.S * s.d : 1);
  parallel_units(heads * chunks, [&](Units& units) {
    Buffer<T> keys_transposed(s.d * KEYS), weights(KEYS * QUERIES), score_grads(KEYS * QUERIES), packed(KEYS * QUERIES);
    Buffer<float> scores(KEYS * QUERIES), weight_grads(KEYS * QUERIES), dq(tile), dq_rows(tile), own_dk(KEYS * s.d),
        own_dv(KEYS * s.d);
    SumsByDistance<QUERIES> own_table_grad(graph.entries);
    Nodes nodes(decay == NONE ? 0 : round_up(s.S, QUERIES));
    QueryBlock<T> block(s.d);
    for (int64_t unit; units.draw(unit);) {
      const int64_t chunk = unit / heads, head = unit % heads, b = head / s.H, h = head % s.H, kv = h / group;
      const int64_t base = chunk * KEYS, known = std::min(KEYS, s.S - base), padded = round_up(known, QUERIES);
      float* dk = group > 1 ? head_dk + (head * s.S + base) * s.d : own_dk;
      float* dv = group > 1 ? head_dv + (head * s.S + base) * s.d : own_dv;
      transpose(bits(k.at(b, base, kv)), k.time, known, s.d, bits(keys_transposed), padded);
      for (int64_t c = 0; c < s.d; ++c)
        std::fill(keys_transposed + c * padded + known, keys_transposed + (c + 1) * padded, T(0));
      std::fill_n(dk, known * s.d, 0.0f);
      std::fill_n(dv, known * s.d, 0.0f);
      if constexpr (decay != NONE) nodes.fill(graph.nodes + 2 * b * s.T, s.T, round_up(s.T, QUERIES));
      for (int64_t task = 0; task < blocks; ++task) {
        const int64_t start = task * QUERIES, rows = std::min(QUERIES, s.T - start);
        const int32_t* range = ranges + 2 * (b * s.T + start);
        const auto [first, high] = seen(range, rows);
        const int64_t first_chunk = first / KEYS, last_chunk = (std::max<int64_t>(high, 1) - 1) / KEYS;
        if (chunk < first_chunk || chunk > last_chunk) continue;
        block.fill(s, q, out, grad_out, lse + head * s.T + start, range, dropout, b, h, start, rows);
        const DecayBlock with{nodes, start, graph.entries, graph.table + h * graph.entries, own_table_grad};
        const int64_t low = std::max(base, first / QUERIES * QUERIES);
        const int64_t whole = std::min(base + KEYS, round_up(high, QUERIES)) - low, count = std::min(whole, s.S - low);
        if (whole > 0) {
          product<T>(count, QUERIES, s.d, k.at(b, low, kv), k.time, block.q_transposed, QUERIES, scores, QUERIES, false);
          product<T>(count, QUERIES, s.d, v.at(b, low, kv), v.time, block.grad_transposed, QUERIES, weight_grads, QUERIES,
                     false);
          weights_and_gradients<T, decay>(block, with, scores, weight_grads, low, count, whole, s.scale, dropout, weights,
                                          score_grads);
          product<T>(count, s.d, QUERIES, weights, QUERIES, block.grad, s.d, dv + (low - base) * s.d, s.d, true);
          product<T>(count, s.d, QUERIES, score_grads, QUERIES, block.q, s.d, dk + (low - base) * s.d, s.d, true);
          pack(score_grads, QUERIES, whole, whole, QUERIES, packed);
          product<T>(s.d, QUERIES, whole, keys_transposed + (low - base), padded, packed, QUERIES, dq, QUERIES, false);
        } else {  // queries without keys
          std::fill_n(static_cast<float*>(dq), tile, 0.0f);
        }
        if (first_chunk < last_chunk) {
          const int64_t sum = head * blocks + task;
          float* total = shared_dq + sum * tile;
          turns.wait(sum, chunk - first_chunk);
          if (chunk > first_chunk)
            for (int64_t i = 0; i < tile; ++i) dq[i] += total[i];
          if (chunk < last_chunk) {
            std::copy_n(static_cast<float*>(dq), tile, total);
            turns.pass(sum);
            continue;
          }
        }
        transpose<float>(dq, QUERIES, s.d, QUERIES, dq_rows, s.d);
        for (int64_t i = 0; i < rows; ++i) store_row(q_grad.at(b, start + i, h), dq_rows + i * s.d, s.d);
      }
      if constexpr (decay != NONE) own_table_grad.move_to(table_grads + (chunk * heads + head) * graph.entries);
      if (group == 1)
        for (int64_t j = 0; j < known; ++j) {
          store_row(k_grad.at(b, base + j, kv), dk + j * s.d, s.d);
          store_row(v_grad.at(b, base + j, kv), dv + j * s.d, s.d);
        }
    }
  });
  if (group > 1) {
    add_heads(s, head_dk, k_grad);
    add_heads(s, head_dv, v_grad);
  }
  sum_parts(table_grads, chunks * s.B, s.H * graph.entries, table_grad);
}

}  // namespace

// Computes the gradients of q, k, v and the decay table from that of `out`; attention_forward describes the rest. The
// table's gradient is (H, entries).
SANSGPU_KERNEL void attention_backward(int64_t narrow, const int64_t* sizes, void* grad_out,
                                       const int64_t* grad_out_strides, void* q, const int64_t* q_strides, void* k,
                                       const int64_t* k_strides, void* v, const int64_t* v_strides, void* out,
                                       const int64_t* out_strides, const float* lse, const int32_t* ranges,
                                       double dropout, const int64_t* seed, const int32_t* nodes, const float* table,
                                       int64_t entries, int64_t added, void* q_grad, const int64_t* q_grad_strides,
                                       void* k_grad, const int64_t* k_grad_strides, void* v_grad,
                                       const int64_t* v_grad_strides, float* table_grad) {
  const Graph graph{nodes, table, entries};
  dispatch(narrow, entries > 0, added, [&]<typename T, Decay decay>(Kind<T, decay>) {
    backward<T, decay>(Shape(sizes), View<T>(q, q_strides), View<T>(k, k_strides), View<T>(v, v_strides),
                       View<T>(out, out_strides), View<T>(grad_out, grad_out_strides), ranges, lse,
                       Dropout(dropout, *seed), graph, View<T>(q_grad, q_grad_strides), View<T>(k_grad, k_grad_strides),
                       View<T>(v_grad, v_grad_strides), table_grad);
  });
}

}  // namespace sansgpu
