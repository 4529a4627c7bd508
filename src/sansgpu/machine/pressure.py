"""Splits micro-batches, and reduces their size, when memory runs short during a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median_low
from typing import Protocol, Self, TypeVar

from sansgpu.events.progress import Warn
from sansgpu.machine.allocator import trim_memory
from sansgpu.machine.execution import Execution

MIN_FREE_BYTES = 256 << 20  # with less free memory the micro-batch is halved; a reserve for heap growth
COMPILER_BYTES = 256 << 20  # additional reserve for compiling a new shape
CHECK_SECONDS = 0.1  # minimum time between checks, which take a tenth of a millisecond
TREND_SECONDS = 2.0  # window over which the memory growth of other processes is estimated
LONGEST_TREND_SECONDS = 10.0  # growth is not extrapolated further, because programs that start soon stop growing


class MemoryShortError(Exception):
    """Raised in the forward pass of a micro-batch that would not fit into memory; the pass is discarded."""


class MemoryGuard:
    """Limits the micro-batch size of `execution` and halves it before memory runs out.

    `available` returns the free bytes and `used` the bytes of this process. `warn` is called with a message at every
    change. At micro-batch size 1, `free_memory` is called: it frees optional memory and returns a clause about the
    consequence, or None if there was no such memory.
    """

    def __init__(
        self,
        execution: Execution,
        available: Callable[[], int],
        used: Callable[[], int],
        warn: Warn,
        free_memory: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._execution, self._available, self._used = execution, available, used
        self._warn, self._free_memory, self._clock = warn, free_memory, clock
        self._least = MIN_FREE_BYTES + (COMPILER_BYTES if execution.compile == "on" else 0)
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
        return min(size, self._execution.micro_batch)

    def check(self) -> None:
        """Checks memory between the blocks of a forward pass. Raises MemoryShortError if the pass must stop."""
        if self._samples and self._clock() - self._samples[-1][0] < CHECK_SECONDS:
            return
        if self._short() and self._execution.micro_batch > 1:
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
        seconds = min(median_low(self._passes), LONGEST_TREND_SECONDS) if len(self._passes) > 1 else 0.0
        return max(0.0, (before - now) / max(last - first, CHECK_SECONDS)) * seconds

    def _relieve(self) -> None:
        held, available = self._used(), self._available()
        trim_memory()
        freed, growth, size = held - self._used(), self._expected_growth(), self._execution.micro_batch
        fitting = size
        while fitting > 1:
            fitting = -(-fitting // 2)
            if self._available() - (freed + growth) * fitting / size >= self._least:
                break
        short = f"memory is running out: {available / 1e6:.0f} MB are available"
        self._execution.micro_batch = fitting
        if fitting < size:
            self._warn(
                f"{short}; the micro-batch size is lowered from {size} to {fitting}, with the same effective batch "
                "size."
            )
        elif consequence := self._free_memory():
            self._warn(f"{short}; {consequence}.")
        else:
            self._helpless = True
            self._warn(
                f"{short}, and the run cannot free more memory; stop other programs, or resume on a machine with more "
                "memory."
            )


class Rows(Protocol):
    """A batch that can be split by rows."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def rows(self, start: int, stop: int) -> Self:
        """Returns some of the rows."""


Piece = TypeVar("Piece", bound=Rows)
Result = TypeVar("Result")


def split_to_fit(
    pieces: Iterable[Piece], forward: Callable[[Piece, Iterable[Piece], int], Result], guard: MemoryGuard | None
) -> Iterator[tuple[Result, bool]]:
    """Yields the result of `forward` for each piece, and whether it is the last one. `guard` limits the size of pieces.

    `forward` is called with a piece, the later pieces and its index. If it raises MemoryShortError, the piece is split
    and tried again.
    """
    pending, index = deque(pieces), 0
    while pending:
        piece = pending.popleft()
        if guard is not None and (rows := guard.allowed(len(piece))) < len(piece):
            pending.appendleft(piece.rows(rows, len(piece)))
            piece = piece.rows(0, rows)
        try:
            result = forward(piece, pending, index)
        except MemoryShortError:
            pending.appendleft(piece)
            continue
        yield result, not pending
        index += 1
