"""Prefetches batches in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from queue import SimpleQueue

from sansgpu.config import SansGPUError
from sansgpu.data.batch import ExampleBatch

CLOSE_SECONDS = 2.0  # how long `close` waits for workers that still prepare a batch


@dataclass
class _Job:
    """A future for the batch of a step."""

    step: int
    batch: Future[ExampleBatch] = field(default_factory=Future)
    worker: int | None = None  # number of the worker that prepares it, from 1; None: no worker was free yet


class Prefetcher:
    """Calls `make(step)` in `workers` threads for up to `depth` future steps.

    A batch depends only on its step, so `workers` and `depth` change no result. Threads suffice: building a batch
    mostly copies from memory-mapped files, which releases the GIL, and processes would take cores from training. The
    threads are daemons, so one that hangs, for example on a network disk, cannot keep the process alive.

    If `workers` or `depth` is 0, one thread builds each batch when its step asks for it, so that the timeout still
    applies.
    """

    def __init__(self, make: Callable[[int], ExampleBatch], workers: int, depth: int, timeout: float) -> None:
        """`timeout` is the longest wait for a batch in seconds."""
        self._make, self._timeout = make, timeout
        self._depth = depth if workers else 0
        self._ready: dict[int, _Job] = {}
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()  # None ends a worker
        names = range(1, (workers if self._depth else 1) + 1)
        self._workers = [
            threading.Thread(target=self._work, args=(name,), name=f"data worker {name}", daemon=True) for name in names
        ]
        for worker in self._workers:
            worker.start()

    def __call__(self, step: int, last: int) -> ExampleBatch:
        """Returns the batch of `step` and starts preparing the following steps, up to step `last` - 1.

        Raises SansGPUError, which names the worker, if the batch is not ready in time or cannot be prepared.
        """
        for ahead in range(step, min(step + self._depth + 1, max(last, step + 1))):
            if ahead not in self._ready:
                self._ready[ahead] = job = _Job(ahead)
                self._queue.put(job)
        return self._result(self._ready.pop(step))

    def forget(self) -> None:
        """Discards all prepared batches."""
        for job in self._ready.values():
            job.batch.cancel()
        self._ready.clear()

    def close(self) -> None:
        """Stops the threads, without waiting long for one that hangs."""
        self.forget()
        for _ in self._workers:
            self._queue.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _result(self, job: _Job) -> ExampleBatch:
        finished = job.batch in wait([job.batch], self._timeout).done
        who = f"data worker {job.worker} of {len(self._workers)}" if job.worker else "no data worker"
        if not finished:
            did = "did not finish" if job.worker else "was free to prepare"
            what = f"{who} {did} the batch of step {job.step + 1}"
            if not self._depth:
                what = f"the batch of step {job.step + 1} was not ready"
            raise SansGPUError(
                f"{what} within {self._timeout:g} s; check that the data's disk responds, or raise "
                "data.timeout_seconds, then continue with --resume latest."
            )
        error = job.batch.exception()
        if error is None or not self._depth or isinstance(error, (SansGPUError, MemoryError)):
            return job.batch.result()
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": .")
        raise SansGPUError(
            f"{who} failed to prepare the batch of step {job.step + 1} ({reason}); check the data and its disk, then "
            "continue with --resume latest."
        ) from error

    def _work(self, worker: int) -> None:
        """Prepares batches in a thread until `close`."""
        while (job := self._queue.get()) is not None:
            job.worker = worker
            if not job.batch.set_running_or_notify_cancel():
                continue
            try:
                job.batch.set_result(self._make(job.step))
            except BaseException as error:  # re-raised in the training thread
                job.batch.set_exception(error)
