"""Prepares batches ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sansgpu.data.batch import ExampleBatch


class Prefetcher:
    """Calls `make(step)` in `workers` threads for up to `depth` future steps.

    A batch depends only on its step, so neither number changes a result. Threads suffice: building a batch mostly
    copies from memory-mapped files, which releases the GIL, and processes would take cores from the training step.
    """

    def __init__(self, make: Callable[[int], ExampleBatch], workers: int, depth: int) -> None:
        self._make = make
        self._depth = depth if workers else 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches") if self._depth else None
        self._ready: dict[int, Future[ExampleBatch]] = {}

    def __call__(self, step: int, last: int) -> ExampleBatch:
        """Returns the batch of `step` and starts preparing the next ones below `last`."""
        if self._pool is None:
            return self._make(step)
        for ahead in range(step, min(step + self._depth + 1, max(last, step + 1))):
            if ahead not in self._ready:
                self._ready[ahead] = self._pool.submit(self._make, ahead)
        return self._ready.pop(step).result()

    def forget(self) -> None:
        """Discards all prepared batches."""
        self._ready.clear()

    def close(self) -> None:
        """Stops the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
