// Forward pass of attention; see attention.h.

#include "attention.h"

namespace sansgpu {
namespace {

constexpr int64_t UNITS_PER_THREAD = 4;  // enough for threads of different speeds to finish at about the same time
constexpr int64_t MIN_TASKS = 4;         // minimum query blocks per unit, because they share packed keys

// Returns the largest distance from a query to a key in its range.
int32_t largest_distance(const Shape& s, const int32_t* ranges, const int32_t* nodes) {
  const int64_t blocks = divide_up(s.T, QUERIES);
  std::atomic<int32_t> largest{0};
  parallel_units(s.B * blocks, [&](Units& units) {
    Nodes example(s.T);
    Buffer<int32_t> distances(s.T);
    for (int64_t unit, filled = -1; units.draw(unit);) {
      const int64_t b = unit / blocks, start = unit % blocks * QUERIES;
      if (b != filled) example.fill(nodes + 2 * b * s.T, s.T, s.T);
      filled = b;
      int32_t most = 0;
      for (int64_t i = start; i < std::min(start + QUERIES, s.T); ++i) {
        const int32_t* range = ranges + 2 * (b * s.T + i);
        const int64_t count = std::max(range[1] - range[0], 0);
        example.distances(i, range[0], count, std::numeric_limits<int32_t>::max(), distances);
        for (int64_t j = 0; j < count; ++j) most = std::max(most, distances[j]);
      }
      for (int32_t before = largest; before < most && !largest.compare_exchange_weak(before, most);) {}
    }
  });
  return largest;
}

// Checks that all keys are in bounds, that `Nodes` can represent all nodes, and that the table has an entry for every
// distance, because the kernels do not check indices.
int64_t check(const Shape& s, const int32_t* ranges, const Graph& graph) {
  for (int64_t i = 0; i < 2 * s.B * s.T; ++i)
    if (ranges[i] < 0 || ranges[i] > s.S) return WRONG_KEY;
  if (graph.entries == 0) return ATTENTION_OK;
  for (int64_t i = 0; i < s.B * s.T; ++i)
    if (!Nodes::takes(graph.nodes[2 * i], graph.nodes[2 * i + 1])) return WRONG_NODE;
  const bool fits = s.B * s.T == 0 || largest_distance(s, ranges, graph.nodes) < graph.entries;
  return fits ? ATTENTION_OK : WRONG_DISTANCE;
}

// Returns the number of units into which the query blocks of one key-value head of an example are divided. Results do
// not depend on it.
int64_t chunks_per_head(int64_t heads, int64_t tasks) {
  const int64_t wanted = divide_up(UNITS_PER_THREAD * omp_get_max_threads(), std::max<int64_t>(1, heads));
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, tasks / MIN_TASKS));
}

// The inputs and results of the pass.
template <typename T>
struct Forward {
  Shape s;
  View<T> q, k, v;
  const int32_t* ranges;
  Dropout dropout;
  Graph graph;
  View<T> out;
  float* lse;
};

// Computes blocks of queries on one thread. Blocks of the same key-value head share its packed keys and values.
template <typename T, Change change>
class QueryBlocks {
 public:
  explicit QueryBlocks(const Forward<T>& pass)
      : p_(pass),
        padded_(round_up(p_.s.S, QUERIES)),
        keys_(p_.s.d * padded_),
        values_(padded_ * p_.s.d),
        weights_(QUERIES * padded_),
        scores_(QUERIES * padded_),
        sums_(QUERIES * p_.s.d),
        inverse_(QUERIES),
        entries_(padded_),
        distances_(padded_),
        nodes_(!decays(change) ? 0 : padded_) {}

  // Packs the keys and values in the ranges of the queries [top, bottom).
  void pack_keys(int64_t b, int64_t kv, int64_t top, int64_t bottom) {
    const Shape& s = p_.s;
    const auto [lowest, highest] = seen(p_.ranges + 2 * (b * s.T + top), bottom - top);
    base_ = lowest / QUERIES * QUERIES;
    span_ = round_up(highest, QUERIES) - base_;
    const int64_t known = std::min(span_, s.S - base_);
    pack_transposed(p_.k.at(b, base_, kv), p_.k.time, known, span_, s.d, keys_);
    pack(p_.v.at(b, base_, kv), p_.v.time, known, span_, s.d, values_);
    if constexpr (decays(change)) nodes_.fill(p_.graph.nodes + 2 * b * s.T, s.T, padded_);
  }

  // Computes the output of head h for the block of queries that starts at `start`. Its keys must be packed.
  void compute(int64_t b, int64_t h, int64_t start) {
    constexpr int64_t PAIR = std::is_same_v<T, bf16> ? 2 : 1;
    const Shape& s = p_.s;
    const int64_t rows = std::min(QUERIES, s.T - start);
    auto [low, high] = seen(p_.ranges + 2 * (b * s.T + start), rows);
    low = low / QUERIES * QUERIES;
    const int64_t width = round_up(high, QUERIES) - low, offset = low - base_;
    if (width > 0)
      product<T>(rows, width, s.d, p_.q.at(b, start, h), p_.q.time, keys_ + offset * PAIR, span_, scores_, width, false);
    for (int64_t i = 0; i < rows; ++i)
      inverse_[i] = weigh(b, h, start + i, low, width, scores_ + i * width, weights_ + i * width);
    if (width > 0)
      product<T>(rows, s.d, width, weights_, width, values_ + offset * s.d, s.d, sums_, s.d, false);
    else
      std::fill_n(static_cast<float*>(sums_), rows * s.d, 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      float* row = sums_ + i * s.d;
      const float factor = inverse_[i];
      for (int64_t c = 0; c < s.d; ++c) row[c] *= factor;
      store_row(p_.out.at(b, start + i, h), row, s.d);
    }
  }

 private:
  // Converts a query's scores for the keys [low, low + width) to attention weights that are not normalized. Returns
  // the inverse of their sum before dropout, or 0 if the query has no keys.
  float weigh(int64_t b, int64_t h, int64_t query, int64_t low, int64_t width, float* row, T* weights) {
    const Dropout drop = p_.dropout;  // a local copy, because the compiler cannot rule out that writes alias it
    const int32_t* range = p_.ranges + 2 * (b * p_.s.T + query);
    const int64_t first = std::max<int64_t>(range[0] - low, 0), last = range[1] - low;
    if (first < last) change_scores(h, query, low, first, last, row);
    const float scale = p_.s.scale;
    const auto [most, sum] = softmax<T>(row, weights, first, last, width, scale * LOG2E);
    if (drop.threshold && first < last) {
      const uint32_t key = drop.row(b * p_.s.H + h, query);
      for (int64_t j = first; j < last; ++j) row[j] *= drop.factor(key, low + j);
      store_row(weights + first, row + first, last - first);
    }
    p_.lse[(b * p_.s.H + h) * p_.s.T + query] = last > first ? most * scale + std::log(sum) : 0.0f;
    return last > first ? 1.0f / sum : 0.0f;
  }

  // Applies the soft cap or the decay to a query's scores for the keys low + [first, last).
  void change_scores(int64_t h, int64_t query, int64_t low, int64_t first, int64_t last, float* row) {
    const int64_t from = first / LANES * LANES, count = round_up(last, LANES) - from;
    if constexpr (change == CAP) {
      const SoftCap cap = p_.s.cap;
      for (int64_t j = from; j < from + count; ++j) row[j] = cap.value(row[j]);
    }
    if constexpr (decays(change)) apply_decay(h, query, low, from, count, row);
  }

  void apply_decay(int64_t h, int64_t query, int64_t low, int64_t from, int64_t count, float* row) {
    const Graph& graph = p_.graph;
    nodes_.distances(query, low + from, count, graph.entries - 1, distances_);
    look_up(graph.table + h * graph.entries, distances_, count, entries_);
    const float* entries = entries_;
    for (int64_t j = 0; j < count; ++j) row[from + j] = decayed<change>(row[from + j], entries[j]);
  }

  const Forward<T>& p_;
  const int64_t padded_;
  Buffer<T> keys_, values_, weights_;
  Buffer<float> scores_, sums_, inverse_, entries_;
  Buffer<int32_t> distances_;
  Nodes nodes_;
  int64_t base_ = 0, span_ = 0;  // first packed key, number of packed keys
};

template <typename T, Change change>
void forward(const Forward<T>& pass) {
  const Shape& s = pass.s;
  const int64_t group = s.H / s.K, heads = s.B * s.K;
  const int64_t tasks = group * divide_up(s.T, QUERIES), chunks = chunks_per_head(heads, tasks);
  parallel_units(heads * chunks, [&](Units& units) {
    QueryBlocks<T, change> blocks(pass);
    for (int64_t unit; units.draw(unit);) {
      const int64_t chunk = chunks - 1 - unit / heads;  // longest first: causal masks give late queries more keys
      const int64_t b = unit % heads / s.K, kv = unit % s.K;
      const int64_t first_task = chunk * tasks / chunks, last_task = (chunk + 1) * tasks / chunks;
      const int64_t top = first_task / group * QUERIES, bottom = std::min(s.T, divide_up(last_task, group) * QUERIES);
      blocks.pack_keys(b, kv, top, bottom);
      for (int64_t task = first_task; task < last_task; ++task)
        blocks.compute(b, kv * group + task % group, task / group * QUERIES);
    }
  });
}

}  // namespace

// Computes `out`, contiguous (B, T, H, d), and the log-sum-exp of the scores, `lse` (B, H, T). `ranges` is (B, T, 2).
// With decay, `nodes` is (B, T, 2) and `table` is (H, entries); otherwise they are null. `softcap` is 0 without a cap and
// with decay. Returns ATTENTION_OK or an error number.
SANSGPU_KERNEL int64_t attention_forward(int64_t narrow, const AttentionSizes* sizes, void* q, const int64_t* q_strides,
                                         void* k, const int64_t* k_strides, void* v, const int64_t* v_strides,
                                         const int32_t* ranges, double dropout, const int64_t* seed,
                                         const int32_t* nodes, const float* table, int64_t entries, int64_t added,
                                         double softcap, void* out, const int64_t* out_strides, float* lse) {
  const Shape s(*sizes, softcap);
  const Graph graph{nodes, table, entries};
  if (const int64_t wrong = check(s, ranges, graph); wrong != ATTENTION_OK) return wrong;
  dispatch(narrow, softcap > 0.0, entries > 0, added, [&]<typename T, Change change>(Kind<T, change>) {
    forward<T, change>(Forward<T>{s, {q, q_strides}, {k, k_strides}, {v, v_strides}, ranges, Dropout(dropout, *seed),
                                  graph, {out, out_strides}, lse});
  });
  return ATTENTION_OK;
}

}  // namespace sansgpu
