// Code shared by the forward and the backward pass of attention over ranges of keys; kernels/attention.py has the
// reference.
//
// B batch, T time, S keys, H query heads, K key-value heads, d head dim. Each block of 64 queries is multiplied only
// with the keys in the range of any query of the block. Scores stay in cache and are recomputed in the backward pass
// (FlashAttention, arXiv 2205.14135). Sums have a fixed order, so that results do not depend on the number of threads.
//
// Scores may have a soft cap. Or tokens may be nodes of a graph (kernels/attention.py). Then attention decays with
// distance: each score, before scaling, is multiplied by (or added to) the entry of the decay table (H, M) for its head
// and its distance from query to key. Distances are computed on the fly.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>

#include "nodes.h"
#include "parallel.h"
#include "product.h"
#include "softcap.h"

namespace sansgpu {

constexpr int64_t QUERIES = 64;  // queries per block; its number of keys is rounded up to a multiple of this
static_assert(QUERIES % LANES == 0, "scores have whole lanes, and packed keys whole pairs of bf16");

// How scores are changed before the softmax: not, by a soft cap, or by an entry of the decay table.
enum Change { NONE, CAP, TIMES, PLUS };

constexpr bool decays(Change change) { return change == TIMES || change == PLUS; }

// A (B, T, heads, d) tensor with a contiguous last dimension and arbitrary strides otherwise.
template <typename T>
struct View {
  T* data;
  int64_t batch, time, head;
  View(void* data, const int64_t* strides)
      : data(static_cast<T*>(data)), batch(strides[0]), time(strides[1]), head(strides[2]) {}
  T* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
};

struct Shape : AttentionSizes {
  float scale;
  SoftCap cap;  // It bounds scores that are not yet multiplied by `scale`.
  Shape(const AttentionSizes& sizes, double softcap)
      : AttentionSizes(sizes),
        scale(1.0f / std::sqrt(static_cast<float>(sizes.d))),
        cap(static_cast<float>(softcap) / scale) {}
};

// Returns the smallest range [low, high) that contains the key ranges of all queries in a block.
inline std::pair<int64_t, int64_t> seen(const int32_t* ranges, int64_t rows) {
  int32_t low = std::numeric_limits<int32_t>::max(), high = 0;
  for (int64_t i = 0; i < rows; ++i)
    if (ranges[2 * i] < ranges[2 * i + 1]) {
      low = std::min(low, ranges[2 * i]);
      high = std::max(high, ranges[2 * i + 1]);
    }
  return {std::min<int64_t>(low, high), high};
}

// Replaces the `width` scores of a query by its unnormalized softmax weights, which are 0 outside of its keys [first,
// last). Returns the largest score and the sum of the weights. Works on full vectors, in which scores of other keys
// count as -inf.
template <typename T>
inline std::pair<float, float> softmax(float* scores, T* weights, int64_t first, int64_t last, int64_t width, float factor) {
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

// The graph nodes of all examples, and the decay table.
struct Graph {
  const int32_t* nodes;
  const float* table;
  int64_t entries;  // table entries per head; 0 without decay
};

template <Change change>
inline float decayed(float score, float entry) {
  return change == TIMES ? score * entry : score + entry;
}

template <typename T, Change change>
struct Kind {};

// Calls run(Kind) with the dtype of q and the change of scores as template parameters.
template <typename F>
void dispatch(bool narrow, bool capped, bool decayed, bool added, const F& run) {
  const auto of = [&]<typename T>(T) {
    capped     ? run(Kind<T, CAP>())
    : !decayed ? run(Kind<T, NONE>())
    : added    ? run(Kind<T, PLUS>())
               : run(Kind<T, TIMES>());
  };
  narrow ? of(bf16()) : of(float());
}

}  // namespace sansgpu
