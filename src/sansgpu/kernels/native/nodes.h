// Distances between the nodes of leafy chain graphs (kernels/attention.py), and lookups of the decay by distance.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "tiles.h"

namespace sansgpu {

// The nodes of an example, encoded so that the distance between two of them is min(|root - root'| + leaf + leaf',
// |place - place'|), where `leaf` is 1 for leaves and 0 for roots. The places of two leaves of the same root differ by
// the distance between their slots. All other places differ by at least the first term of the minimum.
struct Nodes {
  static constexpr int32_t STEP = 4096;
  Buffer<int32_t> root, leaf, place;
  explicit Nodes(int64_t padded) : root(padded), leaf(padded), place(padded) {}

  static_assert(MAX_ROOT * STEP + MAX_SLOT + 1 <= std::numeric_limits<int32_t>::max(), "places are int32");
  static_assert(STEP - (MAX_SLOT + 1) >= 3, "places of leaves of neighboring roots differ by at least their distance");

  static bool takes(int32_t root, int32_t slot) {
    return root >= 0 && root <= MAX_ROOT && slot >= 0 && slot <= MAX_SLOT;
  }

  void fill(const int32_t* nodes, int64_t count, int64_t padded) {
    for (int64_t i = 0; i < padded; ++i) {
      const int32_t r = i < count ? nodes[2 * i] : 0, slot = i < count ? nodes[2 * i + 1] : 0;
      root[i] = r;
      leaf[i] = slot > 0;
      place[i] = r * STEP + slot + leaf[i];
    }
  }

  // Writes the distances from node `one` to the nodes [start, start + count), clamped to `most`.
  void distances(int64_t one, int64_t start, int64_t count, int32_t most, int32_t* __restrict to) const {
    const int32_t *roots = root + start, *leaves = leaf + start, *places = place + start;
    const int32_t r = root[one], l = leaf[one], p = place[one];
    for (int64_t j = 0; j < count; ++j)
      to[j] = std::min(std::min(std::abs(roots[j] - r) + leaves[j] + l, std::abs(places[j] - p)), most);
  }
};

// A separate function, because compilers vectorize the loop only if `__restrict` rules out aliasing.
inline void look_up(const float* __restrict table, const int32_t* __restrict distances, int64_t count,
                    float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = table[distances[i]];
}

// Sums gradients by distance. Consecutive rows with equal distances, e.g. those of the leaves of a root, are added up
// first, because that is vectorized and scattering values to sums is not.
template <int64_t COUNT>
class SumsByDistance {
 public:
  explicit SumsByDistance(int64_t distances) : sums_(distances), size_(distances) { clear(); }

  void clear() {
    std::fill_n(static_cast<float*>(sums_), size_, 0.0f);
    std::fill_n(row_, COUNT, 0.0f);
    std::fill_n(distances_, COUNT, 0);
  }

  void add(const int32_t* distances, const float* row) {
    if (std::memcmp(distances, distances_, sizeof(distances_)) != 0) {
      flush();
      std::copy_n(distances, COUNT, distances_);
      std::copy_n(row, COUNT, row_);
    } else {
      for (int64_t i = 0; i < COUNT; ++i) row_[i] += row[i];
    }
  }

  // Writes the sums to `totals` and resets them.
  void move_to(float* totals) {
    flush();
    std::copy_n(static_cast<float*>(sums_), size_, totals);
    clear();
  }

 private:
  void flush() {
    float* sums = sums_;
#pragma GCC unroll 16
    for (int64_t i = 0; i < COUNT; ++i) sums[distances_[i]] += row_[i];
  }

  Buffer<float> sums_;
  int64_t size_;
  float row_[COUNT];
  int32_t distances_[COUNT];
};

}  // namespace sansgpu
