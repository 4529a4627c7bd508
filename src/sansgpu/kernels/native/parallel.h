// Work that threads share.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace sansgpu {

// Units of work, numbered from 0, that threads draw in order, one at a time. A thread on a slow or busy core draws
// fewer of them, so that the others need not wait for it.
class Units {
 public:
  explicit Units(int64_t count) : count_(count) {}

  bool draw(int64_t& unit) {
    unit = next_.fetch_add(1, std::memory_order_relaxed);
    return unit < count_;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

// Calls work(units) on all threads; it draws units until none is left. A unit must compute the same on every thread.
template <typename F>
void parallel_units(int64_t count, const F& work) {
  Units units(count);
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) { work(units); });
}

// Lets units add to shared sums in a fixed order, so that results do not depend on the threads. A unit may wait only
// for units with a lower number, which were drawn before and so are running or done.
class Turns {
 public:
  explicit Turns(int64_t sums) : turns_(new std::atomic<int32_t>[sums]()) {}

  // Waits until pass(sum) was called `turn` times.
  void wait(int64_t sum, int64_t turn) const {
    for (int64_t tries = 0; turns_[sum].load(std::memory_order_acquire) != turn; ++tries)
      if (tries >= SPINS) std::this_thread::yield();
  }

  void pass(int64_t sum) { turns_[sum].fetch_add(1, std::memory_order_release); }

 private:
  static constexpr int64_t SPINS = 1000;  // about 10 microseconds, after which the core may have other work to do
  std::unique_ptr<std::atomic<int32_t>[]> turns_;
};

}  // namespace sansgpu
