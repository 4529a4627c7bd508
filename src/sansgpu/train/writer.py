"""Writes snapshots in the background: copies the state in memory, then writes the copy in a thread."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.events.progress import Warn
from sansgpu.machine.allocator import memory_in_huge_pages
from sansgpu.machine.probe import available_memory
from sansgpu.models.formats.safetensors_file import GatherTensor, Tensors, bytes_of, unchanged
from sansgpu.train.snapshots import Snapshot, prune, save_snapshot

MIN_FREE_BYTES = 512 << 20  # memory that must stay free next to a copy; an assumption
_ALIGNMENT = 64  # bytes: a cache line


class SnapshotWriter:
    """Writes one snapshot at a time while training continues. Call its methods from one thread only.

    If a copy does not fit into memory, training waits for each snapshot, and `warn` is called once. `record`, the run's
    metrics.jsonl, is synced before the snapshot appears.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        record: Path,
        warn: Warn,
        available: Callable[[], int] = lambda: available_memory(torch.device("cpu")),
    ) -> None:
        self._folder, self._keep_last, self._record = folder, keep_last, record
        self._warn, self._available = warn, available
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: Future[None] | None = None
        self._copies: tuple[_Copy, _Copy] | None = None
        self.reserved = False

    def reserve_copies(self, weights: Tensors, moments: Tensors) -> None:
        """Allocates memory for a copy and faults in its pages, which takes many times longer than the copying."""
        self.reserved = True
        needed, available = sum(t.nbytes for tensors in (weights, moments) for t in tensors.values()), self._available()
        if available >= needed + MIN_FREE_BYTES:
            with contextlib.suppress(OSError, MemoryError):
                self._copies = _Copy(weights), _Copy(moments)
                self._writing = self._thread.submit(self._touch)
                return
        self._warn(
            "training pauses while each snapshot is written, because a copy of weights and moments needs "
            f"{(needed + MIN_FREE_BYTES) / 1e9:.1f} GB of memory, but only {available / 1e9:.1f} GB are available."
        )

    def submit(
        self,
        step: int,
        weights: Tensors,
        moments: Tensors,
        state: dict[str, Any],
        best_step: int | None,
        in_background: bool = True,
        gather: GatherTensor = unchanged,
    ) -> Snapshot:
        """Writes the snapshot of `step` with the current weights and moments and prunes old snapshots.

        The snapshot is complete once `wait` returns. Without `in_background` no copy is made; each tensor is gathered
        with `gather` when it is written. Raises the error of an earlier write that failed.
        """
        if in_background and not self.reserved:
            self.reserve_copies(weights, moments)
        self.wait()  # also for `_touch`, which would overwrite the copy with zeros
        if self._copies is None or not in_background:
            self._write(step, weights, moments, state, best_step, gather)
        else:
            weights, moments = (c.take(t) for c, t in zip(self._copies, (weights, moments), strict=True))
            self._writing = self._thread.submit(self._write, step, weights, moments, state, best_step, unchanged)
        return Snapshot.of(self._folder, step)

    def release_copies(self) -> bool:
        """Frees the memory of the copies and returns whether there was any; training then waits for each snapshot."""
        if self._copies is None:
            return False
        self.wait()
        self._copies = None
        return True

    @property
    def busy(self) -> bool:
        """True while a snapshot is being written or memory is being reserved."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Waits for the snapshot being written. Raises SansGPUError, once, if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _touch(self) -> None:
        for copy in self._copies or ():
            copy.touch()

    def _write(
        self,
        step: int,
        weights: Tensors,
        moments: Tensors,
        state: dict[str, Any],
        best: int | None,
        gather: GatherTensor,
    ) -> None:
        save_snapshot(self._folder, step, weights, moments, state, self._record, gather)
        prune(self._folder, self._keep_last, keep=(best, step))


class _Copy:
    """A reusable buffer for a copy of named tensors."""

    def __init__(self, tensors: Tensors) -> None:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="copy")
        self._flat = torch.frombuffer(memory_in_huge_pages(size), dtype=torch.uint8)
        self._tensors = {
            name: self._flat[offsets[name] : offsets[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def touch(self) -> None:
        """Faults in all pages, without blocking other threads."""
        self._flat.numpy()[:: mmap.PAGESIZE] = 0

    def take(self, tensors: Tensors) -> Tensors:
        """Copies `tensors`, whose names, shapes and dtypes must not change; the result is valid until the next call."""
        assert tensors.keys() == self._tensors.keys()
        for _ in self._threads.map(_copy_bits, self._tensors.values(), (tensors[name] for name in self._tensors)):
            pass  # raises the exceptions of the threads
        return self._tensors


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies one tensor in one thread.

    torch's own parallel copy synchronizes all threads at every tensor, which is 12 times slower if another process uses
    one of the cores.
    """
    if source.device.type == "cpu":
        np.copyto(bytes_of(target), bytes_of(source))
    else:
        target.copy_(source)
