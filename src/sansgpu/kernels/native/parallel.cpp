// The recorder of units of work; see parallel.h.

#include "parallel.h"

#include "tiles.h"

namespace sansgpu {

Recorder recorder;

// Starts to record into `places`, or stops with null.
SANSGPU_KERNEL void record(double* places, int64_t capacity) { recorder = Recorder{places, capacity, 0}; }

// Returns the number of places that were used.
SANSGPU_KERNEL int64_t recorded() { return recorder.used; }

}  // namespace sansgpu
