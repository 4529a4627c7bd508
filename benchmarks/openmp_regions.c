// Records the CPU time of the threads in every OpenMP parallel region of a process.
//
// Preloaded with LD_PRELOAD, it replaces GOMP_parallel, through which torch, oneDNN, compiled graphs and sansgpu's
// kernels start parallel regions. It records only regions of the thread that called `start`, and no nested regions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void (*Body)(void*);
typedef void (*Parallel)(Body, void*, unsigned, unsigned);

typedef struct {
  int64_t start_ns, end_ns;  // since 1970
  int64_t caller_ns;         // CPU time of the calling thread, including that of starting and joining the others
  int64_t longest_ns;        // CPU time of the thread that used the most
  int64_t work_ns;           // CPU time of all threads
  int64_t alone;             // 1 if the region ran on one thread because its code is in the given folder
} Region;

typedef struct {
  Body body;
  void* data;
  atomic_llong longest_ns, work_ns;
} Call;

static Region* regions;  // null if recording is off
static int64_t capacity, used;
static const char* folder_of_units;
static pthread_t recorded_thread;
static _Thread_local int depth;

static int64_t now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void timed(void* argument) {
  Call* call = argument;
  const int64_t start = now(CLOCK_THREAD_CPUTIME_ID);
  ++depth;
  call->body(call->data);
  --depth;
  const long long spent = now(CLOCK_THREAD_CPUTIME_ID) - start;
  long long longest = atomic_load(&call->longest_ns);
  while (spent > longest && !atomic_compare_exchange_weak(&call->longest_ns, &longest, spent)) {
  }
  atomic_fetch_add(&call->work_ns, spent);
}

void GOMP_parallel(Body body, void* data, unsigned threads, unsigned flags) {
  static Parallel parallel;
  if (parallel == NULL) parallel = (Parallel)dlsym(RTLD_NEXT, "GOMP_parallel");
  if (regions == NULL || used == capacity || depth > 0 || !pthread_equal(pthread_self(), recorded_thread)) {
    parallel(body, data, threads, flags);
    return;
  }
  Region* region = &regions[used++];
  Call call = {body, data, 0, 0};
  Dl_info code;
  const int64_t cpu_ns = now(CLOCK_THREAD_CPUTIME_ID);
  region->start_ns = now(CLOCK_REALTIME);
  region->alone = dladdr(body, &code) && !strncmp(code.dli_fname, folder_of_units, strlen(folder_of_units));
  parallel(timed, &call, region->alone ? 1 : threads, flags);
  region->end_ns = now(CLOCK_REALTIME);
  region->caller_ns = now(CLOCK_THREAD_CPUTIME_ID) - cpu_ns;
  region->longest_ns = call.longest_ns;
  region->work_ns = call.work_ns;
}

// Starts to record the regions of this thread. Regions of libraries in `folder` run on one thread, because their threads
// take units of work dynamically: with too few cores, the time of each thread would be random.
void start(Region* places, int64_t count, const char* folder) {
  regions = places;
  capacity = count;
  used = 0;
  folder_of_units = folder;
  recorded_thread = pthread_self();
}

// Stops recording and returns the number of recorded regions.
int64_t stop(void) {
  regions = NULL;
  return used;
}
