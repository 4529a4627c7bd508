"""Saves snapshots while training continues, and restores the state of a run from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import ConfigError, identity
from sansgpu.events.event import Sinks
from sansgpu.models.formats.safetensors_file import SAFETENSORS_TYPES, in_file_order, unchanged
from sansgpu.train.branches import ancestors
from sansgpu.train.outer_optimizer import is_outer
from sansgpu.train.run import TrainingRun
from sansgpu.train.snapshots import MOMENTS, WEIGHTS, Metrics, Progress, Snapshot, best_snapshot
from sansgpu.train.state import TrainState
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
        self, run: TrainingRun, state: TrainState, data_fingerprint: str, sinks: Sinks, elapsed: Callable[[], float]
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
        """Registers the snapshot that the run was resumed from, so that saving its step again only reports it."""
        self.newest = Snapshot.of(self._run.paths.snapshots, snapshot.step)
        self._saved, self._stage = (snapshot.step, metrics), _Stage.RESUMED

    def reserve_copies(self) -> None:
        """Reserves memory for saving in the background, unless it is reserved or the run saves only at its end."""
        training = self._run.config.training
        in_background = self._run.execution.group.is_main and self._run.sharding == "none"
        if in_background and not self._writer.reserved and (training.save_steps or training.eval_steps):
            self._writer.reserve_copies(self._state.weights(), self._state.moments())

    def release_copies(self) -> str | None:
        """Frees the memory of the copies; returns the consequence, or None if there were none."""
        return "training pauses while snapshots are written" if self._writer.release_copies() else None

    def save(self, metrics: Metrics | None, is_last: bool) -> None:
        """Saves the current step, on all ranks, unless the newest snapshot has the same step and metrics.

        Training waits until the last snapshot is written.
        """
        step = self._state.progress.step
        if self._saved != (step, metrics):
            self.flush()
            start = time.perf_counter()
            self.newest = self._write(metrics, in_background=not is_last)
            self._saved, self._seconds = (step, metrics), time.perf_counter() - start
        elif self._stage is not _Stage.RESUMED:
            return
        self._stage = _Stage.WRITING
        self._sinks.hold()

    def _write(self, metrics: Metrics | None, in_background: bool) -> Snapshot:
        """Starts to write a snapshot. If the state is sharded, gathers it on rank 0 and waits until it is written."""
        state, progress, is_sharded = self._state, self._state.progress, self._run.sharding != "none"
        tensors = state.weights(), state.moments()
        if not self._run.execution.group.is_main:
            for part in tensors if is_sharded else ():
                for name in in_file_order(part):
                    state.gather_tensor(name, part[name])
            return Snapshot.of(self._run.paths.snapshots, progress.step)
        record = {
            "progress": progress.model_dump(),
            "metrics": metrics,
            "environment": self._run.execution.environment(),
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


def load_snapshot(
    state: TrainState, snapshot: Snapshot, run: TrainingRun, data_fingerprint: str, differ: Callable[[str], None]
) -> Metrics | None:
    """Loads weights, moments and progress into `state`; returns the metrics of that step if it was evaluated.

    Rank 0 reads each tensor and broadcasts it, and every rank keeps its own part, so a snapshot fits any world size and
    hosts need not share a disk. Raises ConfigError if the model's shapes or its optimizer differ. Calls `differ` with a
    message for each difference of the environment or the data, after which results are not bit-identical.
    """
    group = run.execution.group
    record = group.broadcast_object(snapshot.state)
    shapes = {file: group.broadcast_object(partial(snapshot.shapes, file)) for file in (WEIGHTS, MOMENTS)}
    _require_same_shape(state, shapes[WEIGHTS], snapshot)
    moments = {name: (list(t.shape), t.dtype) for name, t in state.moments().items()}
    theirs = {name: (shape, SAFETENSORS_TYPES.get(dtype)) for name, (shape, dtype) in shapes[MOMENTS].items()}
    if _without_outer(moments) != _without_outer(theirs):
        raise ConfigError(
            f"{snapshot.folder} was written with a different optimizer; set training.optimizer to the value in the "
            "run's config.yaml."
        )
    differences = _differences(record, run.execution.environment(), data_fingerprint)
    if moments.keys() != theirs.keys():
        differences.append(f"training.sync_every {'1' if state.outer else 'greater than 1'}")
    for difference in differences:
        differ(
            f"{snapshot.folder.name} was written with {difference}: "
            "results of the resumed run will not be bit-identical."
        )
    for file in (WEIGHTS, MOMENTS):
        _load_tensors(state, snapshot, file, shapes[file])
    progress = state.progress = Progress(**record["progress"])
    best = progress.best_loss, progress.best_step
    progress.best_loss, progress.best_step = group.broadcast_object(
        lambda: _best_there(snapshot, run.paths.snapshots, *best)
    )
    metrics: Metrics | None = record["metrics"]
    return metrics


def load_weights(state: TrainState, snapshot: Snapshot) -> None:
    """Loads the weights of one of the run's own snapshots into `state` on all ranks; nothing else changes."""
    shapes = state.execution.group.broadcast_object(partial(snapshot.shapes, WEIGHTS))
    _load_tensors(state, snapshot, WEIGHTS, shapes)


def _load_tensors(state: TrainState, snapshot: Snapshot, file: str, shapes: dict[str, tuple[list[int], str]]) -> None:
    group = state.execution.group
    for name, tensor in snapshot.tensors(file) if group.is_main else _empty(shapes):
        if group.size > 1:
            group.broadcast(tensor, 0)
        state.load(name, tensor)


def _without_outer(moments: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the outer momentum, which starts at zero in a run that did not synchronize its ranks before."""
    return {name: value for name, value in moments.items() if not is_outer(name)}


def _best_there(
    snapshot: Snapshot, folder: Path, loss: float | None, step: int | None
) -> tuple[float | None, int | None]:
    """Returns loss and step of the best snapshot that still exists among the ancestors of `snapshot`.

    The recorded best one may have been deleted after a better, now abandoned snapshot was taken.
    """
    found = ancestors(snapshot, folder)
    if step in [None, *(there.step for there in found)]:
        return loss, step
    best = best_snapshot(found)
    return (best.validation_loss(), best.step) if best else (None, None)


def _empty(shapes: dict[str, tuple[list[int], str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields empty tensors to receive the broadcasts of rank 0."""
    for name, (shape, dtype) in sorted(shapes.items()):
        yield name, torch.empty(shape, dtype=SAFETENSORS_TYPES[dtype])


def _require_same_shape(state: TrainState, weights: dict[str, tuple[list[int], str]], snapshot: Snapshot) -> None:
    ours = {name: tuple(tensor.shape) for name, tensor in state.weights().items()}
    theirs = {name: tuple(shape) for name, (shape, _) in weights.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{snapshot.folder} is a snapshot of a different model: {name} is {theirs.get(name, 'missing')} there "
                f"and {ours.get(name, 'missing')} in the configuration; use the run's config.yaml."
            )


def _differences(record: dict[str, Any], now: Mapping[str, object], data_fingerprint: str) -> list[str]:
    before = record["environment"]
    found = [f"{key} {before.get(key)}, now {value}" for key, value in now.items() if before.get(key) != value]
    return found + (["different data or a different base model"] if record["data"] != data_fingerprint else [])
