// Forward pass of attention; see attention.h.

#include "attention.h"

namespace sansgpu {
namespace {

constexpr int64_t UNITS_PER_THREAD = 4;  // enough for threads of different speed to end at about the same time
constexpr int64_t MIN_TASKS = 4;         // query blocks of a unit that share packed keys; with fewer, packing dominates

enum Status : int64_t { OK, WRONG_KEY, WRONG_NODE, WRONG_DISTANCE };  // kernels/attention.py has the messages

// Returns the largest distance from a query to a key that it may see.
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

// Checks that every key is in bounds, that `Nodes` can represent every node, and that the table has an entry for every
// distance, as the kernels index unchecked.
Status check(const Shape& s, const int32_t* ranges, const Graph& graph) {
  for (int64_t i = 0; i < 2 * s.B * s.T; ++i)
    if (ranges[i] < 0 || ranges[i] > s.S) return WRONG_KEY;
  if (graph.entries == 0) return OK;
  for (int64_t i = 0; i < s.B * s.T; ++i)
    if (!Nodes::takes(graph.nodes[2 * i], graph.nodes[2 * i + 1])) return WRONG_NODE;
  return s.B * s.T == 0 || largest_distance(s, ranges, graph.nodes) < graph.entries ? OK : WRONG_DISTANCE;
}

// Into how many units the query blocks of one key-value head of an example are divided. Results do not depend on it.
int64_t chunks_per_head(int64_t heads, int64_t tasks) {
  const int64_t wanted = divide_up(UNITS_PER_THREAD * omp_get_max_threads(), std::max<int64_t>(1, heads));
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, tasks / MIN_TASKS));
}

template <typename T, Decay decay>
void forward(const Shape& s, const View<T>& q, const View<T>& k, const View<T>& v, const int32_t* ranges,
             const Dropout& dropout, const Graph& graph, const View<T>& out, float* lse) {
  const int64_t padded = round_up(s.S, QUERIES), group = s.H / s.K, heads = s.B * s.K;
  const int64_t tasks = group * divide_up(s.T, QUERIES), chunks = chunks_per_head(heads, tasks);
  parallel_units(heads * chunks, [&](Units& units) {
    const Dropout drop = dropout;  // a local copy, because the compiler cannot rule out that writes alias `dropout`
    Buffer<T> keys(s.d * padded), values(padded * s.d), weights(QUERIES * padded);
    Buffer<float> scores(QUERIES * padded), sums(QUERIES * s.d), inverse(QUERIES), entries(padded);
    Buffer<int32_t> distances(padded);
    Nodes nodes(decay == NONE ? 0 : padded);
    for (int64_t unit; units.draw(unit);) {
      const int64_t chunk = chunks - 1 - unit / heads;  // late queries see more keys: the longest units come first
      const int64_t b = unit % heads / s.K, kv = unit % s.K;
      const int64_t first_task = chunk * tasks / chunks, last_task = (chunk + 1) * tasks / chunks;
      const int64_t top = first_task / group * QUERIES, bottom = std::min(s.T, divide_up(last_task, group) * QUERIES);
      const auto [lowest, highest] = seen(ranges + 2 * (b * s.T + top), bottom - top);
      const int64_t base = lowest / QUERIES * QUERIES, span = round_up(highest, QUERIES) - base;
      const int64_t known = std::min(span, s.S - base);
      pack_transposed(k.at(b, base, kv), k.time, known, span, s.d, keys);
      pack(v.at(b, base, kv), v.time, known, span, s.d, values);
      if constexpr (decay != NONE) nodes.fill(graph.nodes + 2 * b * s.T, s.T, padded);
      for (int64_t task = first_task; task < last_task; ++task) {
        const int64_t h = kv * group + task % group, start = task / group * QUERIES;
        const int64_t rows = std::min(QUERIES, s.T - start);
        const int32_t* range = ranges + 2 * (b * s.T + start);
        auto [low, high] = seen(range, rows);
        low = low / QUERIES * QUERIES;
        const int64_t width = round_up(high, QUERIES) - low, offset = low - base;
        if (width > 0)
          product<T>(rows, width, s.d, q.at(b, start, h), q.time, keys + offset * (std::is_same_v<T, bf16> ? 2 : 1), span,
                     scores, width, false);
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
          if (drop.threshold && first < last) {
            const uint32_t key = drop.row(b * s.H + h, start + i);
            for (int64_t j = first; j < last; ++j) row[j] *= drop.factor(key, low + j);
            store_row(weight + first, row + first, last - first);
          }
          inverse[i] = last > first ? 1.0f / sum : 0.0f;
          lse[(b * s.H + h) * s.T + start + i] = last > first ? most * s.scale + std::log(sum) : 0.0f;
        }
        if (width > 0)
          product<T>(rows, s.d, width, weights, width, values + offset * s.d, s.d, sums, s.d, false);
        else
          std::fill_n(static_cast<float*>(sums), rows * s.d, 0.0f);
        for (int64_t i = 0; i < rows; ++i) {
          float* row = sums + i * s.d;
          for (int64_t c = 0; c < s.d; ++c) row[c] *= inverse[i];
          store_row(out.at(b, start + i, h), row, s.d);
        }
      }
    }
  });
}

}  // namespace

// Computes `out`, contiguous (B, T, H, d), and the logarithms of the softmax's sums, `lse` (B, H, T). `sizes` are
// B, T, S, H, K, d; `ranges` is (B, T, 2). With a decay, `nodes` is (B, T, 2) and `table` (H, entries); else they are
// null. Returns a Status.
SANSGPU_KERNEL int64_t attention_forward(int64_t narrow, const int64_t* sizes, void* q, const int64_t* q_strides, void* k,
                                         const int64_t* k_strides, void* v, const int64_t* v_strides,
                                         const int32_t* ranges, double dropout, const int64_t* seed,
                                         const int32_t* nodes, const float* table, int64_t entries, int64_t added,
                                         void* out, const int64_t* out_strides, float* lse) {
  const Shape s(sizes);
  const Graph graph{nodes, table, entries};
  if (const Status status = check(s, ranges, graph); status != OK) return status;
  dispatch(narrow, entries > 0, added, [&]<typename T, Decay decay>(Kind<T, decay>) {
    forward<T, decay>(s, View<T>(q, q_strides), View<T>(k, k_strides), View<T>(v, v_strides), ranges,
                      Dropout(dropout, *seed), graph, View<T>(out, out_strides), lse);
  });
  return OK;
}

}  // namespace sansgpu
