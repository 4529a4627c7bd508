// Multi-threaded matmuls of matrices of any size, composed of matmuls of tiles that fit in cache (product.h).
//
// First, B is packed into panels, and also A if its rows are not contiguous. Then threads take supertiles of C: groups
// of neighboring tiles, whose operands are read several times from the L2 cache of a core. Each tile waits until its
// operands are packed. B may be of any type that `pack_columns` supports; see quantized_rows.h. The summation order of
// an element of C does not depend on the sizes of tiles and supertiles, so they may depend on the number of threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "block_floats.h"
#include "parallel.h"

namespace sansgpu {

constexpr int64_t MOST_ROWS = 128, LEAST_ROWS = 32;  // maximum and minimum rows of a tile of C
// Tiles with fewer multiplications than this are not made smaller; this many take at least 20 microseconds.
constexpr int64_t LEAST_WORK = 4 << 20;
constexpr int64_t PACKED_A = 8 << 20, PACKED_B = 16 << 20;  // bytes packed at once, which fit into shared caches
// Maximum rows and columns of a supertile. A tile then needs an eighth of its rows and a quarter of its columns from
// shared caches, if the L2 cache holds the columns of a supertile and the rows of two tiles.
constexpr int64_t SUPERTILE_SIDE = 512;
constexpr int64_t SUPERTILES = 3;  // minimum supertiles per thread, because threads may be of unequal speed
constexpr int64_t GAP = 32;  // padding between packed rows of A, in values, which avoids cache conflicts

// Returns the rows per tile of C. With many threads they are fewer, so that each thread gets several tiles.
inline int64_t tile_rows(int64_t M, int64_t N, int64_t K) {
  const int64_t tiles = 4 * omp_get_max_threads();
  int64_t rows = MOST_ROWS;
  while (rows > LEAST_ROWS && rows * COLUMNS * K >= LEAST_WORK && divide_up(M, rows) * divide_up(N, COLUMNS) < tiles)
    rows /= 2;
  return rows;
}

// Stores the column sums of a row-major matrix in `sums`, or adds them with `add`.
template <typename T>
void sum_columns(const T* from, int64_t ld, int64_t rows, int64_t columns, float* sums, bool add) {
  if (!add) std::fill_n(sums, columns, 0.0f);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column) sums[column] += load(from + row * ld + column);
}

// A matmul C (M, N) = A (M, K) B (K, N) to compute.
template <typename T, typename Right = Operand<T>>
struct Product {
  static constexpr bool TURNS = std::is_same_v<Right, Operand<T>>;
  int64_t M, N, K;
  Operand<T> a;
  Right b;
  float* total;     // (M, N): receives C in fp32; if null, C is only passed to `finish`
  bool add;         // adds C to `total`
  float* row_sums;  // (M,): if not null, receives the row sums of A, which must be transposed
  bool symmetric = false;  // C is symmetric: computes the tiles of one triangle and mirrors them

  // Returns true if it is faster to compute the transpose of C, i.e. to pack the smaller B^T and transpose the tiles of
  // C, than to transpose A while packing it.
  bool better_turned() const { return TURNS && a.transposed && !b.transposed && (M - N) * K > M * N; }
  Product turned() const {
    if constexpr (TURNS)
      return {N, M, K, b.turned(), a.turned(), total, add, row_sums};
    else
      return *this;
  }
};

// Computes a matmul and calls finish(row, column, count, sums) for each part of a row of C. The operands are packed as
// values of type P. A may already consist of packed rows.
template <typename T, typename Finish, typename Right = Operand<T>, typename P = T>
class Multiplication {
  static constexpr bool CONVERTS = !std::is_same_v<P, T>;
  static constexpr bool IS_PACKED = std::is_same_v<T, bfp16>;  // the rows of A

 public:
  Multiplication(const Product<T, Right>& product, Finish finish)
      : turned_(!CONVERTS && product.better_turned()),
        c_(turned_ ? product.turned() : product),
        finish_(finish),
        pack_a_(CONVERTS || c_.a.transposed || (!IS_PACKED && c_.K % (4 / sizeof(T)) != 0)),
        rows_(c_.symmetric ? COLUMNS : tile_rows(c_.M, c_.N, c_.K)),
        ld_(padded<P>(std::min(c_.K, TERMS)) + GAP),
        strip_(pack_a_ ? at_once(PACKED_A, rows_, c_.M) : c_.M),
        group_(at_once(PACKED_B, COLUMNS, c_.N)),
        packed_a_(pack_a_ ? strip_ * ld_ : 1),
        packed_b_(group_ * ld_),
        own_(c_.total == nullptr && c_.K > TERMS ? c_.M * c_.N : 1) {
    if (c_.total == nullptr && c_.K > TERMS) c_.total = own_;
  }

  void run() { run_together(this, 1); }

  // Computes `count` matmuls in the same parallel regions, so that threads do not wait between them.
  static void run_together(Multiplication* all, int64_t count) {
    int64_t passes = 0, rows = 0;
    for (int64_t i = 0; i < count; ++i) {
      passes = std::max(passes, all[i].passes());
      rows = std::max(rows, all[i].rows_);
    }
    for (int64_t pass = 0; pass < passes; ++pass) {
      std::vector<Part> parts;
      int64_t turns = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (pass >= all[i].passes()) continue;
        parts.emplace_back(all[i], pass, turns);
        turns += parts.back().packs;
      }
      const int64_t units = divide_into_units(parts);
      Turns packed(turns);
      parallel_units(units, [&](Units& drawn) {
        Buffer<float> sums(2 * rows * COLUMNS);
        auto part = parts.begin();
        for (int64_t unit; drawn.draw(unit); part->of.run_unit(*part, unit - part->start, packed, sums))
          while (unit >= part->end) ++part;
        end_products();
      });
    }
  }

 private:
  // The part of a matmul that one parallel region computes: a strip of rows and a group of columns, with the terms from
  // k on. Successive strips reuse the packed B.
  struct Part {
    Multiplication& of;
    int64_t m, n, k, down, across;  // first row, column and term; number of tiles in each direction
    int64_t packs_a, packs, turn;   // units that pack A; units that pack A or B; the turn of the first unit
    int64_t tall = 1, wide = 1;     // tiles of a supertile in each direction
    int64_t whole = 0;              // supertiles that are units; of the others, each tile is a unit
    int64_t start = 0, end = 0;     // range of its units in the region

    Part(Multiplication& of, int64_t pass, int64_t turn)
        : of(of),
          m(pass % of.strips() * of.strip_),
          n(pass / of.strips() % of.groups() * of.group_),
          k(pass / of.strips() / of.groups() * TERMS),
          down(divide_up(std::min(of.strip_, of.c_.M - m), of.rows_)),
          across(divide_up(std::min(of.group_, of.c_.N - n), COLUMNS)),
          packs_a(of.pack_a_ ? down : 0),
          packs(packs_a + (m == 0 ? across : 0)),
          turn(turn) {}

    int64_t supertiles() const { return divide_up(down, tall) * divide_up(across, wide); }

    // Chooses supertiles of at most `most` tiles. Sides of similar length need the fewest bytes of operands.
    void form_supertiles(int64_t most) {
      for (;;) {
        const bool grows_down = tall * of.rows_ <= wide * COLUMNS;
        int64_t& side = grows_down ? tall : wide;
        const int64_t all = grows_down ? down : across, length = grows_down ? of.rows_ : COLUMNS;
        if (2 * tall * wide > most || 2 * side > all || 2 * side * length > SUPERTILE_SIDE) return;
        side *= 2;
      }
    }
  };

  // Divides the parts of a region into units, and returns their number. The last supertiles, one for each thread, are
  // divided into tiles, so that threads end at about the same time.
  static int64_t divide_into_units(std::vector<Part>& parts) {
    const int64_t threads = omp_get_max_threads();
    int64_t tiles = 0, left = 0, units = 0;
    for (const Part& part : parts) tiles += part.down * part.across;
    for (Part& part : parts) {
      part.form_supertiles(tiles / (SUPERTILES * threads));
      left += part.supertiles();
    }
    for (Part& part : parts) {
      const int64_t all = part.supertiles();
      part.whole = std::clamp<int64_t>(left - threads, 0, all);
      left -= all;
      part.start = units;
      units += part.packs + part.whole + (all - part.whole) * part.tall * part.wide;
      part.end = units;
    }
    return units;
  }

  int64_t strips() const { return divide_up(c_.M, strip_); }
  int64_t groups() const { return divide_up(c_.N, group_); }
  int64_t passes() const { return strips() * groups() * divide_up(c_.K, TERMS); }

  // Returns the number of rows or columns to pack at once, in whole tiles.
  int64_t at_once(int64_t bytes, int64_t tile, int64_t all) const {
    return std::min(round_up(all, tile), std::max(tile, bytes / static_cast<int64_t>(sizeof(P)) / ld_ / tile * tile));
  }

  // Packs a strip of A or a panel of B, or computes a supertile or a tile of C.
  void run_unit(const Part& part, int64_t unit, Turns& packed, float* sums) {
    if (unit < part.packs) {
      unit < part.packs_a ? pack_strip(part.m, unit, part.n, part.k) : pack_panel(part.n, unit - part.packs_a, part.k);
      return packed.pass(part.turn + unit);
    }
    const int64_t size = part.tall * part.wide, supertile = unit - part.packs, single = supertile - part.whole;
    if (single >= 0) return run_tile(part, part.whole + single / size, single % size, packed, sums);
    for (int64_t i = 0; i < size; ++i) run_tile(part, supertile, i, packed, sums);
  }

  // Computes the i-th tile of a supertile, if it is inside of C.
  void run_tile(const Part& part, int64_t supertile, int64_t i, const Turns& packed, float* sums) {
    // The order of supertiles rereads the smaller operand, which may stay in cache, for each part of the larger one.
    const int64_t down = divide_up(part.down, part.tall), across = divide_up(part.across, part.wide);
    const int64_t first_y = (down < across ? supertile % down : supertile / across) * part.tall;
    const int64_t first_x = (down < across ? supertile / down : supertile % across) * part.wide;
    // Every second row of a supertile is computed from right to left, so that it begins with the panels that were used
    // last. They are still in the L2 cache even if it is too small for all operands of a supertile.
    const int64_t row = i / part.wide, column = i % part.wide;
    const int64_t y = first_y + row, x = first_x + (row % 2 == 0 ? column : part.wide - 1 - column);
    if (y >= part.down || x >= part.across) return;
    if (c_.symmetric && part.n + x * COLUMNS > part.m + y * COLUMNS) return;  // computed by mirroring its counterpart
    if (pack_a_) packed.wait(part.turn + y, 1);
    if (part.m == 0) packed.wait(part.turn + part.packs_a + x, 1);
    multiply_tile(part.m, y, part.n, x, part.k, sums);
  }

  int64_t terms(int64_t k) const { return std::min(TERMS, c_.K - k); }

  void pack_strip(int64_t m, int64_t y, int64_t n, int64_t k) {
    const int64_t row = m + y * rows_, count = std::min(rows_, c_.M - row);
    pack_rows(c_.a.from(row, k), count, terms(k), packed_a_ + y * rows_ * ld_, ld_);
    if constexpr (!IS_PACKED)
      if (c_.row_sums != nullptr && !turned_ && n == 0)
        sum_columns(c_.a.from(row, k).at, c_.a.ld, terms(k), count, c_.row_sums + row, k > 0);
  }

  void pack_panel(int64_t n, int64_t x, int64_t k) {
    const int64_t column = n + x * COLUMNS, columns = std::min(COLUMNS, c_.N - column);
    pack_columns(c_.b.from(k, column), columns, terms(k), packed_b_ + x * COLUMNS * padded<P>(terms(k)));
    if constexpr (Product<T, Right>::TURNS)
      if (c_.row_sums != nullptr && turned_)
        sum_columns(c_.b.from(k, column).at, c_.b.ld, terms(k), columns, c_.row_sums + column, k > 0);
  }

  void multiply_tile(int64_t m, int64_t y, int64_t n, int64_t x, int64_t k, float* sums) {
    const int64_t row = m + y * rows_, count = std::min(rows_, c_.M - row), places = padded<P>(terms(k));
    const int64_t column = n + x * COLUMNS, columns = std::min(COLUMNS, c_.N - column);
    const P* left = packed_a_ + y * rows_ * ld_;
    if constexpr (!CONVERTS)
      if (!pack_a_) left = c_.a.from(row, k).at;
    const P* right = packed_b_ + x * COLUMNS * places;
    const bool in_place = c_.total != nullptr && !turned_, last = k + terms(k) == c_.K;
    float* to = in_place ? c_.total + row * c_.N + column : sums;
    const int64_t ld = in_place ? c_.N : COLUMNS;
    for (int64_t j = 0; j < columns; j += PANEL<P>) {
      const int64_t width = std::min(PANEL<P>, columns - j), ld_right = BlockFloat<P> ? PANEL<P> : width;
      product<P>(count, width, places, left, pack_a_ ? ld_ : c_.a.ld, right + j * places, ld_right, to + j, ld,
                 in_place && (c_.add || k > 0));
    }
    if (turned_)
      finish_turned(row, count, column, columns, sums, c_.add || k > 0, last);
    else if (last)
      finish_tile(row, count, column, columns, to, ld, sums + rows_ * COLUMNS);
  }

  void finish_tile(int64_t row, int64_t count, int64_t column, int64_t columns, float* sums, int64_t ld, float* mirror) {
    const bool mirrored = c_.symmetric && row != column;
    if (mirrored) transpose(sums, ld, count, columns, mirror, COLUMNS);
    for (int64_t i = 0; i < count; ++i) finish_(row + i, column, columns, sums + i * ld);
    if (mirrored)
      for (int64_t j = 0; j < columns; ++j) finish_(column + j, row, count, mirror + j * COLUMNS);
  }

  // Finishes a tile of the transpose of C.
  void finish_turned(int64_t row, int64_t count, int64_t column, int64_t columns, float* sums, bool add, bool last) {
    float* rows = sums + rows_ * COLUMNS;
    transpose(sums, COLUMNS, count, columns, rows, rows_);
    for (int64_t j = 0; j < columns; ++j) {
      float* from = rows + j * rows_;
      if (c_.total != nullptr) {
        float* to = c_.total + (column + j) * c_.M + row;
        for (int64_t i = 0; i < count; ++i) to[i] = (add ? to[i] : 0.0f) + from[i];
        from = to;
      }
      if (last) finish_(column + j, row, count, from);
    }
  }

  const bool turned_;  // c_ computes the transpose of C
  Product<T, Right> c_;
  const Finish finish_;
  const bool pack_a_;
  const int64_t rows_;   // rows of a tile of C
  const int64_t ld_;     // distance between packed rows of A
  const int64_t strip_;  // rows of A packed at once
  const int64_t group_;  // columns of B packed at once
  Buffer<P> packed_a_, packed_b_;
  Buffer<float> own_;
};

// Calls run(T(), P()) with the dtype T of the operands of matmuls in a precision, and the type P that they are packed as.
template <typename F>
auto with_precision(int64_t precision, const F& run) {
  switch (precision) {
    case BF16: return run(bf16(), bf16());
    case INT16: return run(float(), bfp16());
    case INT8: return run(float(), bfp8());
    case INT8_OF_BF16: return run(bf16(), bfp8());
    default: return run(float(), float());
  }
}

// Multiplies a contiguous A (M, K) with B (K, N), packed as values of type P.
template <typename P, typename T, typename Finish>
void multiply_rows(int64_t M, int64_t N, int64_t K, const T* a, const Operand<T>& b, const Finish& finish) {
  Multiplication<T, Finish, Operand<T>, P>({M, N, K, {a, K, false}, b}, finish).run();
}

// Adds a bias to rows of C and stores them.
template <typename T>
struct StoreWithBias {
  T* to;  // may be null
  int64_t ld;
  const float* bias;  // may be null

  void operator()(int64_t row, int64_t column, int64_t count, float* sums) const {
    if (to == nullptr) return;
    if (bias != nullptr)
      for (int64_t j = 0; j < count; ++j) sums[j] += bias[column + j];
    store_row(to + row * ld + column, sums, count);
  }
};

}  // namespace sansgpu
