// Divides element-wise work on arrays among threads.
#pragma once

#include "parallel.h"
#include "tiles.h"

namespace sansgpu {

constexpr int64_t GRAIN = Dropout::BLOCK;  // values per block

// A block of one of several arrays. `unit` is its number among all blocks, `index` its number in its array, and `start`
// its first value.
struct Block {
  int64_t unit, array, index, start, count;
};

// Divides arrays of the given sizes into blocks of a fixed size: scalar remainders of vectorized loops round
// differently, and results must not depend on the number of threads. All arrays are divided together, so that many
// small arrays keep all threads busy.
class Blocks {
 public:
  template <typename Size>
  Blocks(int64_t arrays, const Size& size) : ends_(arrays), sizes_(arrays), arrays_(arrays) {
    for (int64_t array = 0, end = 0; array < arrays; ++array) {
      sizes_[array] = size(array);
      ends_[array] = end += divide_up(sizes_[array], GRAIN);
    }
  }

  int64_t end(int64_t array) const { return array < 0 ? 0 : ends_[array]; }

  // Calls work(block) for each block of all arrays, on all threads.
  template <typename F>
  void each(const F& work) const {
    parallel_each(end(arrays_ - 1), [&](int64_t unit) {
      const int64_t* ends = ends_;
      const int64_t array = std::upper_bound(ends, ends + arrays_, unit) - ends;
      const int64_t index = unit - end(array - 1), start = index * GRAIN;
      work(Block{unit, array, index, start, std::min(GRAIN, sizes_[array] - start)});
    });
  }

 private:
  Buffer<int64_t> ends_, sizes_;
  int64_t arrays_;
};

// Calls work(block) for each block of one array.
template <typename F>
void for_each_block(int64_t size, const F& work) {
  Blocks(1, [=](int64_t) { return size; }).each(work);
}

// Returns the sum of squares of `count` values.
template <typename T>
double squares(const T* x, int64_t count) {
  return sum_of(count, [&](int64_t i) { return load(x + i) * load(x + i); });
}

}  // namespace sansgpu
