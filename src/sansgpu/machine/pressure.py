"""Memory that runs short while a run goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from sansgpu.machine.allocator import give_back_memory

LEAST_FREE_BYTES = 256 << 20  # below which the micro-batch is cut: what the heap may still come to
COMPILER_BYTES = 256 << 20  # besides, for the compiler that a new shape asks for
LOOK_SECONDS = 0.1  # between two looks, which cost a tenth of a millisecond
TREND_SECONDS = 2.0  # over which others are watched


class MemoryShortError(Exception):
    """Raised in the forward pass of a micro-batch that would not fit; nothing of it is kept."""


class MemoryGuard:
    """Says how large a micro-batch may be, and cuts it in halves before memory runs out.

    `room` tells the bytes that can still be had, `own` those this process has, `warn` is told of every cut. Where
    nothing is left to cut, `shed` is asked to give up what the run can do without, and says what that was, or nothing.
    """

    def __init__(
        self,
        micro_batch: int,
        compiled: bool,
        room: Callable[[], int],
        own: Callable[[], int],
        warn: Callable[[str], None],
        shed: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.micro_batch = micro_batch
        self._room, self._own, self._warn, self._shed, self._clock = room, own, warn, shed, clock
        self._least = LEAST_FREE_BYTES + (COMPILER_BYTES if compiled else 0)
        self._looks: deque[tuple[float, int]] = deque()  # when, and what this process could have had in all
        self._began: float | None = None  # of this micro-batch
        self._passes: deque[float] = deque(maxlen=9)  # seconds between the last ones
        self._helpless = self._stopped = False

    def allowed(self, size: int) -> int:
        """Rows of the next micro-batch, at most `size`; asked before each."""
        now = self._clock()
        if self._began is not None:
            self._passes.append(now - self._began)
        self._began = now
        if self._short() or self._stopped:
            self._relieve()
            self._stopped = False
        return min(size, self.micro_batch)

    def look(self) -> None:
        """Asked between the blocks of a forward pass. Raises MemoryShortError where the pass must not go on."""
        if self._looks and self._clock() - self._looks[-1][0] < LOOK_SECONDS:
            return
        if self._short() and self.micro_batch > 1:
            self._stopped = True
            raise MemoryShortError

    def _short(self) -> bool:
        if self._helpless:
            return False
        now, room = self._clock(), self._room()
        self._looks.append((now, room + self._own()))
        while now - self._looks[0][0] > TREND_SECONDS and len(self._looks) > 2:
            self._looks.popleft()
        return room - self._taken() < self._least

    def _taken(self) -> float:
        """Bytes that others will take until the next micro-batch, at the pace of the last seconds."""
        (first, before), (last, now) = self._looks[0], self._looks[-1]
        # The middle one of the last: compiling or an evaluation may have stood between two.
        lasts = median_low(self._passes) if len(self._passes) > 1 else 0.0
        return max(0.0, (before - now) / max(last - first, LOOK_SECONDS)) * lasts

    def _relieve(self) -> None:
        held, room = self._own(), self._room()
        give_back_memory()
        given, taken, size = held - self._own(), self._taken(), self.micro_batch
        while self.micro_batch > 1:
            self.micro_batch = -(-self.micro_batch // 2)
            share = self.micro_batch / size
            if self._room() - (given + taken) * share >= self._least:
                break
        short = f"memory runs short: {room / 1e6:.0f} MB are left"
        if self.micro_batch < size:
            self._warn(
                f"{short}; the micro-batch is cut from {size} to {self.micro_batch}, the batch and what is learned "
                "stay the same."
            )
        elif shed := self._shed():
            self._warn(f"{short}; {shed}.")
        else:
            self._helpless = True
            self._warn(f"{short}, and there is nothing left to give up; stop other programs, or resume elsewhere.")
