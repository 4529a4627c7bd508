// The recorder of units of work; see parallel.h.

#include "parallel.h"

#include "tiles.h"

namespace sansgpu {

Recorder recorder;

// Starts recording into `places`, or stops recording if it is null.
SANSGPU_KERNEL void record(double* places, int64_t capacity) { recorder = Recorder{places, capacity, 0}; }

// Returns the number of recorded values.
SANSGPU_KERNEL int64_t recorded() { return recorder.used; }

}  // namespace sansgpu
