"""Reduces the micro-batch when memory runs short during a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from sansgpu.machine.allocator import trim_memory

MIN_FREE_BYTES = 256 << 20  # with less free memory the micro-batch is halved; a reserve for heap growth
COMPILER_BYTES = 256 << 20  # additional reserve for compiling a new shape
CHECK_SECONDS = 0.1  # minimum time between checks, which take a tenth of a millisecond
TREND_SECONDS = 2.0  # window over which the memory growth of other processes is estimated


class MemoryShortError(Exception):
    """Raised in the forward pass of a micro-batch that would not fit into memory; the pass is discarded."""


class MemoryGuard:
    """Limits the micro-batch size and halves it before memory runs out.

    `available` returns the free bytes, `used` the bytes of this process, and `warn` is called with a message at every
    change. At micro-batch size 1, `free_memory` is called, which frees optional memory and returns a clause about what
    changes, or None if there was none.
    """

    def __init__(
        self,
        micro_batch: int,
        compiled: bool,
        available: Callable[[], int],
        used: Callable[[], int],
        warn: Callable[[str], None],
        free_memory: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.micro_batch = micro_batch
        self._available, self._used, self._warn, self._free_memory, self._clock = (
            available,
            used,
            warn,
            free_memory,
            clock,
        )
        self._least = MIN_FREE_BYTES + (COMPILER_BYTES if compiled else 0)
        self._samples: deque[tuple[float, int]] = deque()  # (time, bytes available to this process in total)
        self._started: float | None = None  # start time of the current micro-batch
        self._passes: deque[float] = deque(maxlen=9)  # seconds of the last micro-batches
        self._helpless = self._stopped = False

    def allowed(self, size: int) -> int:
        """Returns the allowed rows of the next micro-batch, at most `size`; call it before each micro-batch."""
        now = self._clock()
        if self._started is not None:
            self._passes.append(now - self._started)
        self._started = now
        if self._short() or self._stopped:
            self._relieve()
            self._stopped = False
        return min(size, self.micro_batch)

    def check(self) -> None:
        """Checks memory between the blocks of a forward pass. Raises MemoryShortError if the pass must stop."""
        if self._samples and self._clock() - self._samples[-1][0] < CHECK_SECONDS:
            return
        if self._short() and self.micro_batch > 1:
            self._stopped = True
            raise MemoryShortError

    def _short(self) -> bool:
        if self._helpless:
            return False
        now, available = self._clock(), self._available()
        self._samples.append((now, available + self._used()))
        while now - self._samples[0][0] > TREND_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        return available - self._expected_growth() < self._least

    def _expected_growth(self) -> float:
        """Extrapolates how many bytes other processes will take until the next micro-batch."""
        (first, before), (last, now) = self._samples[0], self._samples[-1]
        # The median, because compilation or an evaluation may have come between two micro-batches.
        seconds = median_low(self._passes) if len(self._passes) > 1 else 0.0
        return max(0.0, (before - now) / max(last - first, CHECK_SECONDS)) * seconds

    def _relieve(self) -> None:
        held, available = self._used(), self._available()
        trim_memory()
        freed, growth, size = held - self._used(), self._expected_growth(), self.micro_batch
        while self.micro_batch > 1:
            self.micro_batch = -(-self.micro_batch // 2)
            share = self.micro_batch / size
            if self._available() - (freed + growth) * share >= self._least:
                break
        short = f"memory runs short: {available / 1e6:.0f} MB are available"
        if self.micro_batch < size:
            self._warn(
                f"{short}; the micro-batch is cut from {size} to {self.micro_batch}, the effective batch stays the "
                "same."
            )
        elif consequence := self._free_memory():
            self._warn(f"{short}; {consequence}.")
        else:
            self._helpless = True
            self._warn(f"{short}, and there is nothing left to free; stop other programs, or resume elsewhere.")
