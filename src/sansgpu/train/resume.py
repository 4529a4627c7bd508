"""Restores training state from a snapshot and reports differences that make the resumed run inexact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch

from sansgpu.config import ConfigError
from sansgpu.machine.probe import Environment
from sansgpu.train.branches import ancestors
from sansgpu.train.run_setup import RunSetup
from sansgpu.train.snapshots import MOMENTS, WEIGHTS, Snapshot, best_snapshot
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.tensor_file import SAFETENSORS_TYPES

Metrics = dict[str, float | None]  # results of an evaluation; None replaces a non-finite value


def load_snapshot(
    state: TrainState, snapshot: Snapshot, run: RunSetup, data_fingerprint: str, differ: Callable[[str], None]
) -> Metrics | None:
    """Loads weights, moments and progress into `state`; returns the metrics of that step if it was evaluated.

    Rank 0 reads each tensor and broadcasts it, and every rank keeps its own part, so a snapshot fits any world size and
    hosts need not share a disk. Raises ConfigError if the model's shapes or its optimizer differ. Calls `differ` with a
    message for each difference of the environment or the data, after which results are not bit-identical.
    """
    group = run.plan.group
    record = group.broadcast_object(snapshot.state)
    shapes = {file: group.broadcast_object(partial(snapshot.shapes, file)) for file in (WEIGHTS, MOMENTS)}
    _require_same_shape(state, shapes[WEIGHTS], snapshot)
    moments = {name: (list(t.shape), t.dtype) for name, t in state.moments().items()}
    if moments != {name: (shape, SAFETENSORS_TYPES.get(dtype)) for name, (shape, dtype) in shapes[MOMENTS].items()}:
        raise ConfigError(
            f"{snapshot.folder} was made with another optimizer; set training.optimizer to the value in the run's "
            "config.yaml."
        )
    for difference in _differences(record, run.environment, data_fingerprint):
        differ(f"{snapshot.folder.name} was made with {difference}: the resumed run will differ in its last bits.")
    for file in (WEIGHTS, MOMENTS):
        for name, tensor in snapshot.tensors(file) if group.is_main else _empty(shapes[file]):
            if group.size > 1:
                group.broadcast(tensor, 0)
            state.load(name, tensor)
    progress = state.progress = Progress.from_json(record["progress"])
    best = progress.best_loss, progress.best_step
    progress.best_loss, progress.best_step = group.broadcast_object(
        lambda: _best_there(snapshot, run.paths.snapshots, *best)
    )
    metrics: Metrics | None = record["metrics"]
    return metrics


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


def recorded_environment(snapshot: Snapshot) -> Environment:
    """Returns the environment recorded in the snapshot."""
    recorded = snapshot.state()["environment"]
    return Environment(**{field.name: recorded[field.name] for field in fields(Environment)})


def _require_same_shape(state: TrainState, weights: dict[str, tuple[list[int], str]], snapshot: Snapshot) -> None:
    ours = {name: tuple(tensor.shape) for name, tensor in state.weights().items()}
    theirs = {name: tuple(shape) for name, (shape, _) in weights.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{snapshot.folder} is of another model: {name} is {theirs.get(name, 'missing')} there and "
                f"{ours.get(name, 'missing')} in the configuration; use the run's own config.yaml."
            )


def _differences(record: dict[str, object], environment: Environment, data_fingerprint: str) -> list[str]:
    before, now = record["environment"], asdict(environment)
    assert isinstance(before, dict)
    found = [f"{key} {before.get(key)}, now {value}" for key, value in now.items() if before.get(key) != value]
    return found + (["other data or another base model"] if record["data"] != data_fingerprint else [])
