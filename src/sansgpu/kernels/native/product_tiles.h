// Matmuls with AMX, which has eight tile registers of 16 rows of 64 bytes.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"
#ifdef SANSGPU_EMULATE_AMX
#include "emulated_amx.h"
#else
#include <immintrin.h>
#endif

namespace sansgpu {

constexpr int64_t TILE = 16;   // rows, columns of C, and pairs of K in a tile
constexpr int64_t STEPS = 16;  // tiles of K per pass, so that the panel of B stays in the L1 cache

// The tile configuration of this thread: rows and columns of C, and pairs of K. All 0 if it is not configured.
struct TileShape {
  int64_t rows = 0, columns = 0, pairs = 0;
  bool operator==(const TileShape&) const = default;
};
inline thread_local TileShape configured;

// Asks Linux for the permission to use AMX, which every process needs. Returns false if it is denied.
inline bool may_use_tiles() {
#ifdef SANSGPU_EMULATE_AMX
  return true;
#else
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // asm/prctl.h
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
#endif
}

// Configures tiles 0-3 for C, 4-5 for A and 6-7 for B. A thread keeps its configuration for the next matmul, because
// loading one takes about as long as several tile multiplications.
inline void configure_tiles(const TileShape& shape) {
  if (shape == configured) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // bytes per row of each tile
    uint8_t rows[16] = {};
  } layout;
  for (int64_t tile = 0; tile < 8; ++tile) {
    const bool of_a = tile == 4 || tile == 5, of_b = tile >= 6;
    layout.bytes[tile] = static_cast<uint16_t>(4 * (of_a ? shape.pairs : shape.columns));
    layout.rows[tile] = static_cast<uint8_t>(of_b ? shape.pairs : shape.rows);
  }
  __asm__ volatile("" : : "r"(&layout) : "memory");  // GCC's intrinsics do not declare that they read the whole operand
  _tile_loadconfig(&layout);
  configured = shape;
}

// Releases the tiles of this thread, because other code may need a different configuration, and tiles in use slow down
// context switches.
inline void release_tiles() {
  if (configured == TileShape()) return;
  _tile_release();
  configured = TileShape();
}

// Computes (ROWS, COLUMNS) tiles of C = A B over `steps` tiles of K, or adds to C with `add`. ldb is in pairs.
template <int64_t ROWS, int64_t COLUMNS>
void multiply_tiles(int64_t steps, const bf16* A, int64_t lda, const uint32_t* B, int64_t ldb, float* C, int64_t ldc,
                    bool add) {
  const int64_t c = 4 * ldc, a = 2 * lda, b = 4 * ldb;  // bytes
  float* below = C + TILE * ldc;
  __asm__ volatile("" : : : "memory");  // the intrinsics do not declare which memory they read
  if (add) {
    _tile_loadd(0, C, c);
    if constexpr (COLUMNS == 2) _tile_loadd(1, C + TILE, c);
    if constexpr (ROWS == 2) _tile_loadd(2, below, c);
    if constexpr (ROWS == 2 && COLUMNS == 2) _tile_loadd(3, below + TILE, c);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, A += 2 * TILE, B += TILE * ldb) {
    _tile_loadd(6, B, b);
    _tile_loadd(4, A, a);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (COLUMNS == 2) {
      _tile_loadd(7, B + TILE, b);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (ROWS == 2) {
      _tile_loadd(5, A + TILE * lda, a);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (ROWS == 2 && COLUMNS == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, C, c);
  if constexpr (COLUMNS == 2) _tile_stored(1, C + TILE, c);
  if constexpr (ROWS == 2) _tile_stored(2, below, c);
  if constexpr (ROWS == 2 && COLUMNS == 2) _tile_stored(3, below + TILE, c);
}

// Multiplies with tiles of the same shape, whose sizes must divide M, N and K. If a tile has fewer rows or columns than
// TILE, it must be the only one in that direction.
inline void multiply_region(const TileShape& shape, int64_t M, int64_t N, int64_t K, const bf16* A, int64_t lda,
                            const uint32_t* B, int64_t ldb, float* C, int64_t ldc, bool add) {
  configure_tiles(shape);
  const int64_t steps = K / (2 * shape.pairs);
  for (int64_t step = 0; step < steps; step += STEPS, A += STEPS * 2 * TILE, B += STEPS * TILE * ldb, add = true)
    for (int64_t column = 0; column < N; column += 2 * TILE)
      for (int64_t row = 0; row < M; row += 2 * TILE) {
        const bool two_rows = row + TILE < M, two_columns = column + TILE < N;
        const auto multiply = two_rows ? two_columns ? multiply_tiles<2, 2> : multiply_tiles<2, 1>
                                       : two_columns ? multiply_tiles<1, 2> : multiply_tiles<1, 1>;
        multiply(std::min(STEPS, steps - step), A + row * lda, lda, B + column, ldb, C + row * ldc + column, ldc, add);
      }
}

// A range of an index, covered by full tiles or by one smaller tile for the remainder.
struct Part {
  int64_t start, count, tile;
  Part(int64_t size, bool rest) : start(rest ? size - size % TILE : 0), count(rest ? size % TILE : size - size % TILE) {
    tile = rest ? count : TILE;
  }
};

// The matmul of product.h: first with full tiles, then the remainders of M, N and K with smaller tiles.
inline void multiply_by_tiles(int64_t M, int64_t N, int64_t K, const bf16* A, int64_t lda, const uint32_t* B,
                              int64_t ldb, float* C, int64_t ldc, bool add) {
  for (int64_t rest = 0; rest < 8; ++rest) {
    const Part rows(M, rest & 1), columns(N, rest & 2), pairs(K / 2, rest & 4);
    if (rows.count && columns.count && pairs.count)
      multiply_region({rows.tile, columns.tile, pairs.tile}, rows.count, columns.count, 2 * pairs.count,
                      A + rows.start * lda + 2 * pairs.start, lda, B + pairs.start * ldb + columns.start, ldb,
                      C + rows.start * ldc + columns.start, ldc, add || pairs.start > 0);
  }
}

}  // namespace sansgpu
