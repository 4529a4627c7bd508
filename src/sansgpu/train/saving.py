"""Saves snapshots while training continues, and reports each one with an event."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum, auto

from sansgpu.config import identity
from sansgpu.events.event import Sinks
from sansgpu.machine.probe import Environment
from sansgpu.train.resume import Metrics
from sansgpu.train.run_setup import RunSetup
from sansgpu.train.snapshots import Snapshot
from sansgpu.train.state import TrainState
from sansgpu.train.tensor_file import in_file_order, unchanged
from sansgpu.train.writer import SnapshotWriter


class _Stage(Enum):
    """The stages of the newest snapshot."""

    RESUMED = auto()  # the run was resumed from it, and this process has not reported it
    WRITING = auto()  # it is written, possibly in the background; later events are held back until it is reported
    REPORTED = auto()  # its event was emitted; also the stage before the first snapshot


class Saver:
    """Writes snapshots one at a time. `newest` is the last one, None before the first, and passes through the stages.

    `save` starts WRITING, from any stage; `flush` waits for the disk and makes it REPORTED. Because events are held
    back in between, their order does not depend on how long writing takes.
    """

    def __init__(
        self, run: RunSetup, state: TrainState, data_fingerprint: str, sinks: Sinks, elapsed: Callable[[], float]
    ) -> None:
        """`elapsed` returns the seconds the run has taken."""
        self.newest: Snapshot | None = None
        self._saved: tuple[int, Metrics | None] | None = None  # step and metrics in the newest snapshot
        self._stage = _Stage.REPORTED
        self._seconds = 0.0  # time that training waited for the newest snapshot
        self._run, self._state, self._data_fingerprint = run, state, data_fingerprint
        self._sinks, self._elapsed = sinks, elapsed
        training, paths = run.config.training, run.paths
        self._writer = SnapshotWriter(paths.snapshots, training.keep_last, paths.metrics, sinks.warn)

    def restore(self, snapshot: Snapshot, metrics: Metrics | None) -> None:
        """Takes over the snapshot from which the run was resumed; saving its step again only reports it."""
        self.newest = Snapshot.of(self._run.paths.snapshots, snapshot.step)
        self._saved, self._stage = (snapshot.step, metrics), _Stage.RESUMED

    def reserve_copies(self) -> None:
        """Reserves memory for saving in the background, unless that was done or the run saves only at its end."""
        training = self._run.config.training
        in_background = self._run.plan.group.is_main and self._run.sharding == "none"
        if in_background and not self._writer.prepared and (training.save_steps or training.eval_steps):
            self._writer.reserve_copies(self._state.weights(), self._state.moments())

    def release_copies(self) -> str | None:
        """Frees the memory of the copies; returns the consequence, or None if there were none."""
        return "snapshots are written before training goes on" if self._writer.release_copies() else None

    def save(self, metrics: Metrics | None, environment: Environment, is_last: bool) -> None:
        """Saves the current step, on all ranks, unless the newest snapshot has the same step and metrics.

        Training waits until the last snapshot is written.
        """
        step = self._state.progress.step
        if self._saved != (step, metrics):
            self.flush()
            start = time.perf_counter()
            self.newest = self._write(metrics, environment, in_background=not is_last)
            self._saved, self._seconds = (step, metrics), time.perf_counter() - start
        elif self._stage is not _Stage.RESUMED:
            return
        self._stage = _Stage.WRITING
        self._sinks.hold()

    def _write(self, metrics: Metrics | None, environment: Environment, in_background: bool) -> Snapshot:
        """Starts to write a snapshot. If the state is sharded, gathers it on rank 0 and waits until it is written."""
        state, progress, is_sharded = self._state, self._state.progress, self._run.sharding != "none"
        tensors = state.weights(), state.moments()
        if not self._run.plan.group.is_main:
            for part in tensors if is_sharded else ():
                for name in in_file_order(part):
                    state.gather_tensor(name, part[name])
            return Snapshot.of(self._run.paths.snapshots, progress.step)
        record = {
            "progress": progress.to_json(),
            "metrics": metrics,
            "environment": asdict(environment),
            "data": self._data_fingerprint,
            "configuration": identity(self._run.config),
        }
        return self._writer.submit(
            progress.step,
            *tensors,
            record,
            progress.best_step,
            in_background=in_background and not is_sharded,
            gather=state.gather_tensor if is_sharded else unchanged,
        )

    def flush_if_written(self) -> None:
        """Reports the newest snapshot if that requires no waiting."""
        if not self._writer.busy:
            self.flush()

    def flush(self) -> None:
        """Waits until the newest snapshot is written, reports it and releases the events held back.

        Raises SansGPUError if writing failed.
        """
        if self._stage is not _Stage.WRITING:
            return
        assert self.newest is not None
        self._stage, start = _Stage.REPORTED, time.perf_counter()
        self._writer.wait()
        seconds = self._seconds + time.perf_counter() - start
        event = {"event": "snapshot", "step": self.newest.step, "path": self.newest.folder.name, "seconds": seconds}
        self._sinks.release({**event, "elapsed_seconds": self._elapsed()})

    def close(self) -> None:
        """Completes a snapshot being written and releases the events held back, however training ended."""
        try:
            self.flush()
        except Exception as error:  # only a warning: another error may have ended the training
            self._sinks.warn(str(error))
        finally:
            self._sinks.release()
