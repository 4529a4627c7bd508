// Forward pass of attention; see attention.h.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "attention.h"

namespace sansgpu {
namespace {

constexpr int64_t UNITS_PER_THREAD = 4;  // enough for threads of different speed to end at about the same time
constexpr int64_t MIN_TASKS = 4;         // query blocks of a unit that share packed keys; with fewer, packing dominates

// Checks that there is one range per query and that every key is in bounds, as the kernels index unchecked.
inline void check(const Shape& s, const at::Tensor& ranges) {
  TORCH_CHECK(s.H == 0 || (s.K > 0 && s.H % s.K == 0), s.K, " key-value heads do not divide ", s.H, " query heads");
  TORCH_CHECK(ranges.is_contiguous() && ranges.sizes() == at::IntArrayRef({s.B, s.T, 2}), "ranges must be (B, T, 2)");
  const int32_t* range = ranges.data_ptr<int32_t>();
  for (int64_t i = 0; i < 2 * s.B * s.T; ++i)
    TORCH_CHECK_INDEX(range[i] >= 0 && range[i] <= s.S, "key ", range[i], " is out of range");
}

// Checks that `Nodes` can represent every node and that the table has an entry for every distance.
inline void check(const Shape& s, const at::Tensor& ranges, const at::Tensor& nodes, const at::Tensor& table) {
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

// Into how many units the query blocks of one key-value head of an example are divided. Results do not depend on it.
int64_t chunks_per_head(int64_t heads, int64_t tasks) {
  const int64_t wanted = at::divup(UNITS_PER_THREAD * at::get_num_threads(), std::max<int64_t>(1, heads));
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, tasks / MIN_TASKS));
}

template <typename T, Decay decay>
void forward(const Shape& s, const View<T>& q, const View<T>& k, const View<T>& v, const int32_t* ranges,
             const Dropout& dropout, const Graph& graph, const View<T>& out, float* lse) {
  const int64_t padded = round_up(s.S, QUERIES), group = s.H / s.K, heads = s.B * s.K;
  const int64_t tasks = group * at::divup(s.T, QUERIES), chunks = chunks_per_head(heads, tasks);
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
      const int64_t top = first_task / group * QUERIES, bottom = std::min(s.T, at::divup(last_task, group) * QUERIES);
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
          if (drop.threshold) {
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
    at::native::cpublas::brgemm_release(std::is_same_v<T, bf16>);
  });
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

}  // namespace

TORCH_LIBRARY_IMPL(sansgpu, CPU, library) { library.impl("attention_forward", &attention_forward); }

}  // namespace sansgpu
