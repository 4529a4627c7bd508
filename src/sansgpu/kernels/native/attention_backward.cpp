// Backward pass of attention; see attention.h.
//
// A unit of work is a block of keys of one query head. It alone computes the gradients of its keys and values.
// Gradients of queries are sums over blocks of keys, to which the units add in a fixed order.

#include "attention.h"

namespace sansgpu {
namespace {

constexpr int64_t KEYS = 256;  // per block of keys
static_assert(KEYS % QUERIES == 0, "KEYS must be a multiple of QUERIES");

int64_t key_blocks(const Shape& s) { return std::max<int64_t>(1, divide_up(s.S, KEYS)); }  // 1 if there are no keys

// The inputs and results of the pass.
template <typename T>
struct Backward {
  Shape s;
  View<T> q, k, v, out, grad_out;
  const int32_t* ranges;
  const float* lse;
  Dropout dropout;
  Graph graph;
  View<T> q_grad, k_grad, v_grad;
  float* table_grad;
};

// The inputs of the backward pass for a block of queries, packed for each of its four matmuls.
template <typename T>
struct QueryBlock {
  Buffer<T> q, q_transposed, grad, grad_transposed;
  float lse[QUERIES], dot[QUERIES];
  int32_t first[QUERIES], last[QUERIES];
  uint32_t key[QUERIES];
  explicit QueryBlock(int64_t d) : q(QUERIES * d), q_transposed(d * QUERIES), grad(QUERIES * d), grad_transposed(d * QUERIES) {}

  // Loads the queries [start, start + rows) of head h.
  void fill(const Backward<T>& p, int64_t b, int64_t h, int64_t start, int64_t rows) {
    const Shape& s = p.s;
    const int32_t* range = p.ranges + 2 * (b * s.T + start);
    const float* row_lse = p.lse + (b * s.H + h) * s.T + start;
    pack(p.q.at(b, start, h), p.q.time, rows, QUERIES, s.d, q);
    pack_transposed(p.q.at(b, start, h), p.q.time, rows, QUERIES, s.d, q_transposed);
    pack(p.grad_out.at(b, start, h), p.grad_out.time, rows, QUERIES, s.d, grad);
    pack_transposed(p.grad_out.at(b, start, h), p.grad_out.time, rows, QUERIES, s.d, grad_transposed);
    for (int64_t i = 0; i < QUERIES; ++i) {
      first[i] = i < rows ? range[2 * i] : 0;
      last[i] = i < rows ? range[2 * i + 1] : 0;
      lse[i] = i < rows ? row_lse[i] * LOG2E : 0.0f;
      key[i] = p.dropout.row(b * s.H + h, start + i);
      if (i < rows) {
        const T *o = p.out.at(b, start + i, h), *g = p.grad_out.at(b, start + i, h);
        dot[i] = sum_of(s.d, [&](int64_t c) { return load(o + c) * load(g + c); });
      } else {
        dot[i] = 0.0f;
      }
    }
  }
};

// Inputs for the decay of a block: its nodes, its first query, the head's table entries and their gradients.
struct DecayBlock {
  const Nodes& nodes;
  int64_t start, entries;
  const float* table;
  SumsByDistance<QUERIES>& table_grad;
};

// Computes attention weights and score gradients of a (keys, QUERIES) block from its scores and weight gradients.
template <typename T, Change change>
void weights_and_gradients(const QueryBlock<T>& block, const DecayBlock& with, const float* scores,
                           const float* weight_grads, int64_t low, int64_t count, int64_t padded, const Shape& s,
                           Dropout dropout, T* weights, T* score_grads) {
  const float scale = s.scale, factor = scale * LOG2E;
  const SoftCap cap = s.cap;
  for (int64_t j = 0; j < count; ++j) {
    const int32_t key = static_cast<int32_t>(low + j);
    const float *score = scores + j * QUERIES, *weight_grad = weight_grads + j * QUERIES;
    float p[QUERIES], kept[QUERIES], grad[QUERIES], entries[QUERIES], capped[QUERIES];
    int32_t distances[QUERIES];
    if constexpr (change == NONE) {
      for (int64_t i = 0; i < QUERIES; ++i) p[i] = exp2_nonpositive(score[i] * factor - block.lse[i]);
    } else if constexpr (change == CAP) {
      for (int64_t i = 0; i < QUERIES; ++i) capped[i] = cap.value(score[i]);
      for (int64_t i = 0; i < QUERIES; ++i) p[i] = exp2_nonpositive(capped[i] * factor - block.lse[i]);
    } else {
      with.nodes.distances(key, with.start, QUERIES, with.entries - 1, distances);
      look_up(with.table, distances, QUERIES, entries);
      for (int64_t i = 0; i < QUERIES; ++i)
        p[i] = exp2_nonpositive(decayed<change>(score[i], entries[i]) * factor - block.lse[i]);
    }
    for (int64_t i = 0; i < QUERIES; ++i) p[i] = (block.first[i] <= key) & (key < block.last[i]) ? p[i] : 0.0f;
    if (dropout.threshold) {
      for (int64_t i = 0; i < QUERIES; ++i) kept[i] = dropout.factor(block.key[i], key);
      for (int64_t i = 0; i < QUERIES; ++i) grad[i] = p[i] * (weight_grad[i] * kept[i] - block.dot[i]) * scale;
      for (int64_t i = 0; i < QUERIES; ++i) p[i] *= kept[i];
    } else {
      for (int64_t i = 0; i < QUERIES; ++i) grad[i] = p[i] * (weight_grad[i] - block.dot[i]) * scale;
    }
    if constexpr (change == CAP)
      for (int64_t i = 0; i < QUERIES; ++i) grad[i] *= cap.slope(capped[i]);
    if constexpr (decays(change)) {
      float by_entry[QUERIES];
      for (int64_t i = 0; i < QUERIES; ++i) by_entry[i] = change == TIMES ? grad[i] * score[i] : grad[i];
      if constexpr (change == TIMES)
        for (int64_t i = 0; i < QUERIES; ++i) grad[i] *= entries[i];
      with.table_grad.add(distances, by_entry);
    }
    store_row(weights + j * QUERIES, p, QUERIES);
    store_row(score_grads + j * QUERIES, grad, QUERIES);
  }
  std::fill(score_grads + count * QUERIES, score_grads + padded * QUERIES, T(0));
}

// Sums the gradients `parts` (B, H, S, d) of each key-value head over its query heads.
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

// Sums `parts` (count, size) into `total` (size,) in order.
void sum_parts(const float* parts, int64_t count, int64_t size, float* total) {
  std::fill_n(total, size, 0.0f);
  for (int64_t part = 0; part < count; ++part)
    for (int64_t i = 0; i < size; ++i) total[i] += parts[part * size + i];
}

// Gradients to which several units add.
struct Sums {
  Buffer<float> dq;  // (B, H, query blocks, d, QUERIES), summed over blocks of keys
  Turns turns;       // one sequence of turns for each block of queries
  Buffer<float> dk, dv;        // (B, H, S, d), summed over the query heads of a key-value head
  Buffer<float> table_grads;   // (chunks, B, H, entries)

  explicit Sums(const Shape& s, int64_t entries)
      : dq(key_blocks(s) > 1 ? s.B * s.H * divide_up(s.T, QUERIES) * QUERIES * s.d : 1),
        turns(s.B * s.H * divide_up(s.T, QUERIES)),
        dk(s.H > s.K ? s.B * s.H * s.S * s.d : 1),
        dv(s.H > s.K ? s.B * s.H * s.S * s.d : 1),
        table_grads(key_blocks(s) * s.B * s.H * entries) {}
};

// Computes units of work on one thread.
template <typename T, Change change>
class KeyBlocks {
 public:
  KeyBlocks(const Backward<T>& pass, Sums& sums)
      : p_(pass),
        sums_(sums),
        group_(p_.s.H / p_.s.K),
        query_blocks_(divide_up(p_.s.T, QUERIES)),
        tile_(QUERIES * p_.s.d),
        keys_transposed_(p_.s.d * KEYS),
        weights_(KEYS * QUERIES),
        score_grads_(KEYS * QUERIES),
        packed_(KEYS * QUERIES),
        scores_(KEYS * QUERIES),
        weight_grads_(KEYS * QUERIES),
        dq_(tile_),
        dq_rows_(tile_),
        own_dk_(KEYS * p_.s.d),
        own_dv_(KEYS * p_.s.d),
        table_grad_(p_.graph.entries),
        nodes_(!decays(change) ? 0 : round_up(p_.s.S, QUERIES)),
        queries_(p_.s.d) {}

  // Computes the gradients of a head's block `chunk` of keys, and adds its contributions to the gradients of the
  // queries.
  void compute(int64_t chunk, int64_t head) {
    const Shape& s = p_.s;
    begin(chunk, head);
    for (int64_t block = 0; block < query_blocks_; ++block) add_queries(block);
    if constexpr (decays(change))
      table_grad_.move_to(sums_.table_grads + (chunk * s.B * s.H + head) * p_.graph.entries);
    if (group_ == 1)
      for (int64_t j = 0; j < known_; ++j) {
        store_row(p_.k_grad.at(b_, base_ + j, kv_), dk_ + j * s.d, s.d);
        store_row(p_.v_grad.at(b_, base_ + j, kv_), dv_ + j * s.d, s.d);
      }
  }

 private:
  void begin(int64_t chunk, int64_t head) {
    const Shape& s = p_.s;
    chunk_ = chunk, head_ = head, b_ = head / s.H, h_ = head % s.H, kv_ = h_ / group_;
    base_ = chunk * KEYS, known_ = std::min(KEYS, s.S - base_), padded_ = round_up(known_, QUERIES);
    dk_ = group_ > 1 ? sums_.dk + (head * s.S + base_) * s.d : own_dk_;
    dv_ = group_ > 1 ? sums_.dv + (head * s.S + base_) * s.d : own_dv_;
    transpose(bits(p_.k.at(b_, base_, kv_)), p_.k.time, known_, s.d, bits(keys_transposed_), padded_);
    for (int64_t c = 0; c < s.d; ++c)
      std::fill(keys_transposed_ + c * padded_ + known_, keys_transposed_ + (c + 1) * padded_, T(0));
    std::fill_n(dk_, known_ * s.d, 0.0f);
    std::fill_n(dv_, known_ * s.d, 0.0f);
    if constexpr (decays(change)) nodes_.fill(p_.graph.nodes + 2 * b_ * s.T, s.T, round_up(s.T, QUERIES));
  }

  // Adds the contribution of a block of queries to the gradients of the keys. If this block of keys is the last one for
  // these queries, stores the gradients of the queries.
  void add_queries(int64_t block) {
    const Shape& s = p_.s;
    const int64_t start = block * QUERIES, rows = std::min(QUERIES, s.T - start);
    const auto [first, high] = seen(p_.ranges + 2 * (b_ * s.T + start), rows);
    const int64_t first_chunk = first / KEYS, last_chunk = (std::max<int64_t>(high, 1) - 1) / KEYS;
    if (chunk_ < first_chunk || chunk_ > last_chunk) return;
    queries_.fill(p_, b_, h_, start, rows);
    const int64_t low = std::max(base_, first / QUERIES * QUERIES);
    const int64_t whole = std::min(base_ + KEYS, round_up(high, QUERIES)) - low;
    if (whole > 0)
      multiply(start, low, whole);
    else  // queries without any keys
      std::fill_n(static_cast<float*>(dq_), tile_, 0.0f);
    if (first_chunk < last_chunk && !sum_up(block, first_chunk, last_chunk)) return;
    transpose<float>(dq_, QUERIES, s.d, QUERIES, dq_rows_, s.d);
    for (int64_t i = 0; i < rows; ++i) store_row(p_.q_grad.at(b_, start + i, h_), dq_rows_ + i * s.d, s.d);
  }

  // Computes the contributions to the gradients of the queries starting at `start` and of the keys [low, low + whole),
  // some of which may be past the last key.
  void multiply(int64_t start, int64_t low, int64_t whole) {
    const Shape& s = p_.s;
    const DecayBlock with{nodes_, start, p_.graph.entries, p_.graph.table + h_ * p_.graph.entries, table_grad_};
    const int64_t count = std::min(whole, s.S - low), place = low - base_;
    product<T>(count, QUERIES, s.d, p_.k.at(b_, low, kv_), p_.k.time, queries_.q_transposed, QUERIES, scores_, QUERIES,
               false);
    product<T>(count, QUERIES, s.d, p_.v.at(b_, low, kv_), p_.v.time, queries_.grad_transposed, QUERIES, weight_grads_,
               QUERIES, false);
    weights_and_gradients<T, change>(queries_, with, scores_, weight_grads_, low, count, whole, s, p_.dropout, weights_,
                                     score_grads_);
    product<T>(count, s.d, QUERIES, weights_, QUERIES, queries_.grad, s.d, dv_ + place * s.d, s.d, true);
    product<T>(count, s.d, QUERIES, score_grads_, QUERIES, queries_.q, s.d, dk_ + place * s.d, s.d, true);
    pack(score_grads_, QUERIES, whole, whole, QUERIES, packed_);
    product<T>(s.d, QUERIES, whole, keys_transposed_ + place, padded_, packed_, QUERIES, dq_, QUERIES, false);
  }

  // Adds the contributions of all earlier blocks of keys to `dq_`, the gradients of a block of queries. If this is not
  // the last block of keys, passes the sum on to the next one and returns false.
  bool sum_up(int64_t block, int64_t first_chunk, int64_t last_chunk) {
    const int64_t sum = head_ * query_blocks_ + block;
    float *total = sums_.dq + sum * tile_, *dq = dq_;
    sums_.turns.wait(sum, chunk_ - first_chunk);
    if (chunk_ > first_chunk)
      for (int64_t i = 0; i < tile_; ++i) dq[i] += total[i];
    if (chunk_ == last_chunk) return true;
    std::copy_n(dq, tile_, total);
    sums_.turns.pass(sum);
    return false;
  }

  const Backward<T>& p_;
  Sums& sums_;
  const int64_t group_, query_blocks_, tile_;
  Buffer<T> keys_transposed_, weights_, score_grads_, packed_;
  Buffer<float> scores_, weight_grads_, dq_, dq_rows_, own_dk_, own_dv_;
  SumsByDistance<QUERIES> table_grad_;
  Nodes nodes_;
  QueryBlock<T> queries_;
  int64_t chunk_ = 0, head_ = 0, b_ = 0, h_ = 0, kv_ = 0;  // the current unit
  int64_t base_ = 0, known_ = 0, padded_ = 0;  // its first key, number of keys, and that rounded up to whole blocks
  float *dk_ = nullptr, *dv_ = nullptr;  // gradients of its keys and values
};

template <typename T, Change change>
void backward(const Backward<T>& pass) {
  const Shape& s = pass.s;
  const int64_t heads = s.B * s.H, chunks = key_blocks(s);
  Sums sums(s, pass.graph.entries);
  parallel_units(heads * chunks, [&](Units& units) {
    KeyBlocks<T, change> blocks(pass, sums);
    for (int64_t unit; units.draw(unit);) blocks.compute(unit / heads, unit % heads);
  });
  if (s.H > s.K) {
    add_heads(s, sums.dk, pass.k_grad);
    add_heads(s, sums.dv, pass.v_grad);
  }
  sum_parts(sums.table_grads, chunks * s.B, s.H * pass.graph.entries, pass.table_grad);
}

}  // namespace

// Computes the gradients of q, k, v and the decay table, (H, entries), from the gradient of `out`. See
// attention_forward for the other parameters.
SANSGPU_KERNEL void attention_backward(int64_t narrow, const AttentionSizes* sizes, void* grad_out,
                                       const int64_t* grad_out_strides, void* q, const int64_t* q_strides, void* k,
                                       const int64_t* k_strides, void* v, const int64_t* v_strides, void* out,
                                       const int64_t* out_strides, const float* lse, const int32_t* ranges,
                                       double dropout, const int64_t* seed, const int32_t* nodes, const float* table,
                                       int64_t entries, int64_t added, double softcap, void* q_grad,
                                       const int64_t* q_grad_strides, void* k_grad, const int64_t* k_grad_strides,
                                       void* v_grad, const int64_t* v_grad_strides, float* table_grad) {
  dispatch(narrow, softcap > 0.0, entries > 0, added, [&]<typename T, Change change>(Kind<T, change>) {
    backward<T, change>(Backward<T>{Shape(*sizes, softcap), {q, q_strides}, {k, k_strides}, {v, v_strides},
                                    {out, out_strides}, {grad_out, grad_out_strides}, ranges, lse,
                                    Dropout(dropout, *seed), {nodes, table, entries}, {q_grad, q_grad_strides},
                                    {k_grad, k_grad_strides}, {v_grad, v_grad_strides}, table_grad});
  });
}

}  // namespace sansgpu
