// Divides work among the threads of torch's OpenMP runtime.
#pragma once

#include <omp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <memory>
#include <thread>

#include "product.h"

namespace sansgpu {

// Records the CPU seconds of each unit of work, for benchmarks that project the speedup with many threads. A parallel
// region of `count` units is recorded as count + 1 values: -count, then the seconds of its units in order.
struct Recorder {
  double* places = nullptr;  // null if recording is off
  int64_t capacity = 0, used = 0;

  // Returns where to record the units of a new region, or null if recording is off or its memory is full.
  double* region(int64_t count) {
    if (places == nullptr || used + count + 1 > capacity) return nullptr;
    double* first = places + used;
    used += count + 1;
    *first = -static_cast<double>(count);
    return first + 1;
  }

  static double seconds() {
#ifdef _WIN32  // Windows has no such clock
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
#else
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
#endif
  }
};

extern Recorder recorder;

// Units of work, numbered from 0, which threads take in order, one at a time (dynamic scheduling). A thread on a slow
// or busy core takes fewer units, so that other threads do not have to wait for it.
class Units {
 public:
  explicit Units(int64_t count) : count_(count), seconds_(recorder.region(count)) {}

  // Takes the next unit, or returns false if none is left. Each thread must call it until it returns false.
  bool draw(int64_t& unit) {
    if (seconds_ != nullptr) record();
    unit = next_.fetch_add(1, std::memory_order_relaxed);
    if (seconds_ != nullptr) own_unit = unit < count_ ? unit : -1;
    return unit < count_;
  }

 private:
  void record() {
    const double now = Recorder::seconds();
    if (own_unit >= 0) seconds_[own_unit] = now - own_start;
    own_start = now;
  }

  static inline thread_local int64_t own_unit = -1;  // the unit that this thread works on, if units are recorded
  static inline thread_local double own_start = 0;
  std::atomic<int64_t> next_{0};
  const int64_t count_;
  double* const seconds_;
};

// Calls work(units) on all threads, which must take units until none is left. The result of a unit must not depend on
// the thread.
template <typename F>
void parallel_units(int64_t count, const F& work) {
  Units units(count);
  // Always uses all threads: libgomp ends threads that a smaller team does not use, and starting them again takes
  // longer.
#pragma omp parallel if (count > 1)
  {
    work(units);
    end_products();  // because torch may use AMX on these threads next
  }
}

// Calls work(unit) for each unit, on all threads.
template <typename F>
void parallel_each(int64_t count, const F& work) {
  parallel_units(count, [&](Units& units) {
    for (int64_t unit; units.draw(unit);) work(unit);
  });
}

// Lets units add to shared sums in a fixed order, so that results do not depend on the number of threads. A unit may
// wait only for units with lower numbers, which were taken earlier, so they are running or done.
class Turns {
 public:
  explicit Turns(int64_t sums) : turns_(new std::atomic<int32_t>[sums]()) {}

  // Waits until pass(sum) has been called `turn` times.
  void wait(int64_t sum, int64_t turn) const {
    for (int64_t tries = 0; turns_[sum].load(std::memory_order_acquire) != turn; ++tries)
      if (tries >= SPINS) std::this_thread::yield();
  }

  void pass(int64_t sum) { turns_[sum].fetch_add(1, std::memory_order_release); }

 private:
  static constexpr int64_t SPINS = 1000;  // about 10 microseconds; then yields, because the core may have other work
  std::unique_ptr<std::atomic<int32_t>[]> turns_;
};

}  // namespace sansgpu
