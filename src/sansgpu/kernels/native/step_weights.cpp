// Packing of weights that are not quantized for decoding steps; kernels/decoder_step.py describes the layout.

#include "matmul.h"

namespace sansgpu {
namespace {

constexpr int64_t TILE = STEP_TILE;

template <typename T>
void pack_tiles(const T* weight, int64_t N, int64_t terms, T* to) {
  parallel_each(divide_up(N, TILE), [=](int64_t tile) {
    const int64_t rows = std::min(TILE, N - tile * TILE);
    pack_transposed(weight + tile * TILE * terms, terms, rows, TILE, terms, to + tile * TILE * terms);
  });
}

// Packs a weight into tiles of block floats.
template <typename T>
void pack_integer_tiles(const T* weight, int64_t N, int64_t terms, bfp8* to) {
  const int64_t ld = padded<bfp8>(terms);
  parallel_each(divide_up(N, TILE), [=](int64_t tile) {
    bfp8* at = to + tile * TILE * ld;
    const int64_t outputs = std::min(TILE, N - tile * TILE);
    std::fill_n(reinterpret_cast<int8_t*>(at), TILE * ld, int8_t{0});  // a panel without any column
    pack_columns(Operand<T>{weight + tile * TILE * terms, terms, true}, outputs, terms, at);
  });
}

}  // namespace

// Packs a weight (N, terms) into tiles of TILE outputs: in its own dtype or, for INT8 and INT8_OF_BF16, as INT8_TILES.
SANSGPU_KERNEL void pack_step_weight(int64_t precision, const void* weight, int64_t N, int64_t terms, void* to) {
  with_precision(precision, [&]<typename T, typename P>(T, P) {
    const auto values = static_cast<const T*>(weight);
    if constexpr (std::is_same_v<P, bfp8>)
      pack_integer_tiles(values, N, terms, static_cast<bfp8*>(to));
    else
      pack_tiles(values, N, terms, static_cast<T*>(to));
  });
}

// Returns the bytes of a tile in the format INT8_TILES.
SANSGPU_KERNEL int64_t int8_tile_bytes(int64_t terms) { return TILE * padded<bfp8>(terms); }

}  // namespace sansgpu
