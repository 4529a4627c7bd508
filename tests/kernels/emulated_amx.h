// The AMX intrinsics as plain loops, so that code that uses them can be tested on any processor. They abort the process
// where a processor with AMX would raise an error, e.g. if tiles are not configured or their shapes do not match.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

struct EmulatedTile {
  uint16_t bytes = 0;  // bytes in a row of the tile
  uint8_t rows = 0;
  uint8_t data[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];

inline EmulatedTile& emulated_tile(int tile) {
  if (emulated_tiles[tile].rows == 0) std::abort();
  return emulated_tiles[tile];
}

inline void _tile_release() {
  for (EmulatedTile& tile : emulated_tiles) tile = EmulatedTile();
}

inline void _tile_zero(int tile) { std::memset(emulated_tile(tile).data, 0, sizeof(EmulatedTile::data)); }

inline void _tile_loadconfig(const void* layout) {
  const auto from = static_cast<const uint8_t*>(layout);
  if (from[0] != 1) std::abort();  // the palette
  for (int tile = 0; tile < 8; ++tile) {
    EmulatedTile& t = emulated_tiles[tile];
    std::memcpy(&t.bytes, from + 16 + 2 * tile, 2);
    t.rows = from[48 + tile];
    if (t.rows > 16 || t.bytes > 64 || (t.rows == 0) != (t.bytes == 0)) std::abort();
    std::memset(t.data, 0, sizeof(t.data));
  }
}

inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  EmulatedTile& t = emulated_tile(tile);
  _tile_zero(tile);
  for (int row = 0; row < t.rows; ++row)
    std::memcpy(t.data[row], static_cast<const uint8_t*>(from) + row * stride, t.bytes);
}

inline void _tile_stored(int tile, void* to, int64_t stride) {
  const EmulatedTile& t = emulated_tile(tile);
  for (int row = 0; row < t.rows; ++row) std::memcpy(static_cast<uint8_t*>(to) + row * stride, t.data[row], t.bytes);
}

inline float emulated_bf16(const uint8_t* from) {
  float value;
  uint8_t bytes[4] = {0, 0, from[0], from[1]};
  std::memcpy(&value, bytes, 4);
  return value;
}

inline void _tile_dpbf16ps(int sums, int left, int right) {
  EmulatedTile &c = emulated_tile(sums), &a = emulated_tile(left), &b = emulated_tile(right);
  if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != 4 * b.rows) std::abort();
  for (int row = 0; row < c.rows; ++row)
    for (int column = 0; column < c.bytes; column += 4) {
      float sum;
      std::memcpy(&sum, c.data[row] + column, 4);
      for (int k = 0; k < a.bytes; k += 2)
        sum += emulated_bf16(a.data[row] + k) * emulated_bf16(b.data[k / 4] + column + k % 4);
      std::memcpy(c.data[row] + column, &sum, 4);
    }
}
