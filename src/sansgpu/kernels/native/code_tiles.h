// Matmuls with weights in a block format that multiply the codes of the weights, instead of dequantizing them.
//
// `pack_codes` packs a weight once into tiles of STEP_TILE outputs. Rows are rounded to integers of 16 bits, or of 8,
// which share a scale in each group of 32 values. A group's sum of products is exact; only its products with scales and
// the additions of groups are rounded. `format` is the number of a block format.
#pragma once

#include "tiles.h"

namespace sansgpu {

// Returns the bytes of a tile of a weight with rows of `terms` values.
int64_t code_tile_bytes(int64_t format, int64_t terms);

// Returns the bytes of a row that is packed as integers of `parts` bytes, 1 or 2.
int64_t integer_row_bytes(int64_t parts, int64_t terms);

template <typename T>
void pack_integer_row(int64_t parts, const T* from, int64_t terms, uint8_t* to);

// Computes sums (rows, STEP_TILE) = packed rows times a packed tile.
void multiply_code_tile(int64_t format, int64_t parts, int64_t terms, const uint8_t* tile, int64_t rows,
                        const uint8_t* packed, float* sums);

}  // namespace sansgpu
