// A minimal OpenMP runtime for ThreadSanitizer, which does not see how the threads of GCC's runtime wait for each other
// and would report a race in every parallel region. Here each region starts threads and joins them, which it does see,
// and which orders memory exactly as OpenMP promises. The kernels use nothing else of OpenMP.

#include <thread>
#include <vector>

namespace {
constexpr int THREADS = 4;
}

extern "C" {

int omp_get_max_threads() { return THREADS; }

// Runs the body of a parallel region on all threads, or on as many as are given.
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned thread = 1; thread < (threads > 0 ? threads : THREADS); ++thread) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}

}
