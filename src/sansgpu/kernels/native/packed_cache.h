// KV cache for generation, stored in the layout that matmuls read (`pack` in tiles.h), so that decoding steps do not
// have to convert it.
//
// S is the maximum number of tokens of a sequence, a multiple of CACHE_BLOCK; d is the head dim.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace sansgpu {

// The cache of one key-value head of a sequence.
template <typename T>
struct PackedCache {
  static constexpr int64_t PAIR = std::is_same_v<T, bf16> ? 2 : 1;  // values per word of a packed matrix

  static_assert(CACHE_BLOCK % LANES == 0 && LANES % PAIR == 0, "tokens are stored in whole lanes and words");

  T *keys, *values;  // (S / CACHE_BLOCK, d / PAIR, CACHE_BLOCK, PAIR) and (S / PAIR, d, PAIR)
  int64_t d;

  PackedCache(void* keys, void* values, int64_t head, int64_t S, int64_t d)
      : keys(static_cast<T*>(keys) + head * S * d), values(static_cast<T*>(values) + head * S * d), d(d) {}

  const T* key_block(int64_t block) const { return keys + block * CACHE_BLOCK * d; }

  // Stores the key and value of a token. Earlier tokens must be stored first. The first of LANES tokens sets the
  // `values` of all of them to 0: attention multiplies those after the last token by weights of 0, and NaN in
  // uninitialized memory would remain NaN.
  void store(int64_t position, const T* key, const T* value) const {
    T* to = keys + position / CACHE_BLOCK * CACHE_BLOCK * d + position % CACHE_BLOCK * PAIR;
    for (int64_t i = 0; i < d; i += PAIR) std::memcpy(to + i * CACHE_BLOCK, key + i, PAIR * sizeof(T));
    if (position % LANES == 0) std::fill_n(bits(values + position * d), LANES * d, 0);
    store_value(position, value);
  }

 private:
  void store_value(int64_t position, const float* value) const { std::copy_n(value, d, values + position * d); }

  void store_value(int64_t position, const bf16* value) const {
    auto words = reinterpret_cast<uint32_t*>(values) + position / 2 * d;
    const uint32_t shift = position % 2 * 16, kept = ~(0xFFFFu << shift);
    for (int64_t i = 0; i < d; ++i)
      words[i] = (words[i] & kept) | static_cast<uint32_t>(bits(value)[i]) << shift;
  }
};

}  // namespace sansgpu
