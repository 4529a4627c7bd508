"""Snapshots written behind the training: a copy in memory, and a thread that takes it to the disk."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sansgpu.machine.probe import available_memory
from sansgpu.train.checkpoint import Snapshot, prune, save_snapshot
from sansgpu.train.tensor_file import Tensors, Whole, as_it_is, bytes_of

MEMORY_LEFT = 512 << 20  # that a copy leaves free for what else the run may come to need; an assumption
_ALIGNMENT = 64  # of every tensor in a copy: a cache line


class SnapshotWriter:
    """Writes one snapshot at a time while training goes on. Its methods are for one thread, the loop's.

    Where memory has no room for a copy, a snapshot is written before training goes on, and `warn` is told once.
    `record` is the run's metrics.jsonl: its lines are on the disk before a snapshot of their step is there.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        record: Path,
        warn: Callable[[str], None],
        room: Callable[[], int] = lambda: available_memory(torch.device("cpu")),
    ) -> None:
        self._folder, self._keep_last, self._record = folder, keep_last, record
        self._warn, self._room = warn, room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: Future[None] | None = None
        self._copies: tuple[_Copy, _Copy] | None = None
        self.prepared = False

    def prepare(self, weights: Tensors, moments: Tensors) -> None:
        """Have memory for a copy of these ready: the first touch of it takes many times longer than the copying."""
        self.prepared = True
        needed, room = sum(t.nbytes for tensors in (weights, moments) for t in tensors.values()), self._room()
        if room >= needed + MEMORY_LEFT:
            with contextlib.suppress(OSError, MemoryError):
                self._copies = _Copy(weights), _Copy(moments)
                self._writing = self._thread.submit(self._touch)
                return
        self._warn(
            f"a copy of weights and moments needs {(needed + MEMORY_LEFT) / 1e9:.1f} GB of memory and {room / 1e9:.1f} "
            "GB are available: training waits while each snapshot is written."
        )

    def begin(
        self,
        step: int,
        weights: Tensors,
        moments: Tensors,
        state: dict[str, Any],
        best_step: int | None,
        behind: bool = True,
        whole: Whole = as_it_is,
    ) -> Snapshot:
        """Write the snapshot of `step`, as weights and moments are now, and delete those that are too many.

        What is returned is whole once `wait` has returned; not `behind` training, which has ended, it takes no copy.
        Then `whole` is asked for each tensor, one at a time, where they are spread over several processes.
        Raises what writing an earlier one raised.
        """
        if behind and not self.prepared:
            self.prepare(weights, moments)
        self.wait()  # for the memory too, which is zeroed by touching it
        if self._copies is None or not behind:
            self._write(step, weights, moments, state, best_step, whole)
        else:
            weights, moments = (c.take(t) for c, t in zip(self._copies, (weights, moments), strict=True))
            self._writing = self._thread.submit(self._write, step, weights, moments, state, best_step, as_it_is)
        return Snapshot.of(self._folder, step)

    def drop_copies(self) -> bool:
        """Give up the memory of the copies; from now on training waits while a snapshot is written. Whether there was
        any.
        """
        if self._copies is None:
            return False
        self.wait()
        self._copies = None
        return True

    @property
    def busy(self) -> bool:
        """Whether a snapshot, or the memory for copies, is still in the making."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Return when what was begun is whole. Raises, once, SansGPUError where the disk refused it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _touch(self) -> None:
        for copy in self._copies or ():
            copy.touch()

    def _write(
        self, step: int, weights: Tensors, moments: Tensors, state: dict[str, Any], best: int | None, whole: Whole
    ) -> None:
        save_snapshot(self._folder, step, weights, moments, state, self._record, whole)
        prune(self._folder, self._keep_last, keep=(best, step))


class _Copy:
    """Memory for a copy of named tensors, used again for every copy."""

    def __init__(self, tensors: Tensors) -> None:
        offsets, size = {}, 0
        for name, tensor in tensors.items():
            offsets[name] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="copy")
        memory = mmap.mmap(-1, max(size, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._flat = torch.frombuffer(memory, dtype=torch.uint8)
        self._tensors = {
            name: self._flat[offsets[name] : offsets[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def touch(self) -> None:
        """Have the kernel give all of the memory, without holding up other threads."""
        self._flat.numpy()[:: mmap.PAGESIZE] = 0

    def take(self, tensors: Tensors) -> Tensors:
        """A copy of `tensors`, which have the names, shapes and types of the first ones; valid until the next."""
        assert tensors.keys() == self._tensors.keys()
        for _ in self._threads.map(_copy_bits, self._tensors.values(), (tensors[name] for name in self._tensors)):
            pass  # what one raised is raised here
        return self._tensors


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Each thread its own tensors: torch has all threads wait for each other at every tensor.

    That is 12 times slower where another process has one of the cores.
    """
    if source.device.type == "cpu":
        np.copyto(bytes_of(target), bytes_of(source))
    else:
        target.copy_(source)
