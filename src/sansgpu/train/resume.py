"""Taking up a snapshot, and saying where it cannot be exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch

from sansgpu.config import ConfigError
from sansgpu.machine.group import ALONE, Group
from sansgpu.machine.probe import Environment
from sansgpu.train.branches import ancestors
from sansgpu.train.checkpoint import MOMENTS, WEIGHTS, Snapshot, best_of
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.tensor_file import TYPES

Metrics = dict[str, float | None]  # of an evaluation; None where a number is not finite


def restore(
    state: TrainState,
    snapshot: Snapshot,
    folder: Path,
    environment: Environment,
    data_fingerprint: str,
    strict: bool,
    warn: Callable[[str], None],
    group: Group = ALONE,
) -> Metrics | None:
    """Load weights, moments and progress into `state`; returns the metrics of that step where it was evaluated.

    `folder` is the run's `snapshots/`. Rank 0 reads each tensor and sends it to the other ranks, which keep their own
    part: so a snapshot fits any number of ranks, and hosts need not share a disk. Raises ConfigError if the model has
    another shape; if the environment or the data differ, which changes bits, it warns, or with `strict` raises.
    """
    record = group.decide(snapshot.state)
    shapes = {file: group.decide(partial(snapshot.shapes, file)) for file in (WEIGHTS, MOMENTS)}
    _require_same_shape(state, shapes[WEIGHTS], snapshot)
    if shapes[MOMENTS].keys() != state.optimizer.state_names():
        raise ConfigError(f"{snapshot.folder} was made with another optimizer; set training.optimizer as it was.")
    for difference in _differences(record, environment, data_fingerprint):
        message = f"{snapshot.folder.name} was made with {difference}: the resumed run will differ in its last bits."
        if strict:
            raise ConfigError(f"{message} Without --strict it would go on.")
        warn(message)
    for file in (WEIGHTS, MOMENTS):
        for name, tensor in snapshot.tensors(file) if group.first else _empty(shapes[file]):
            if group.size > 1:
                group.send(tensor, 0)
            state.load(name, tensor)
    progress = state.progress = Progress.from_json(record["progress"])
    best = progress.best_loss, progress.best_step
    progress.best_loss, progress.best_step = group.decide(lambda: _best_there(snapshot, folder, *best))
    metrics: Metrics | None = record["metrics"]
    return metrics


def _best_there(
    snapshot: Snapshot, folder: Path, loss: float | None, step: int | None
) -> tuple[float | None, int | None]:
    """Loss and step of the best snapshot until then. Another becomes it if it was deleted, as a later one was better
    before the run went back.
    """
    found = ancestors(snapshot, folder)
    if step in [None, *(there.step for there in found)]:
        return loss, step
    best = best_of(found)
    return (best.validation_loss(), best.step) if best else (None, None)


def _empty(shapes: dict[str, tuple[list[int], str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Room for the tensors that rank 0 sends."""
    for name, (shape, dtype) in sorted(shapes.items()):
        yield name, torch.empty(shape, dtype=TYPES[dtype])


def recorded_environment(snapshot: Snapshot) -> Environment:
    """What the snapshot's run computed with."""
    recorded = snapshot.state()["environment"]
    return Environment(**{field.name: recorded[field.name] for field in fields(Environment)})


def _require_same_shape(state: TrainState, weights: dict[str, tuple[list[int], str]], snapshot: Snapshot) -> None:
    ours = {name: tuple(tensor.shape) for name, tensor in state.weights().items()}
    theirs = {name: tuple(shape) for name, (shape, _) in weights.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{snapshot.folder} is of another model: {name} is {theirs.get(name, 'missing')} there and "
                f"{ours.get(name, 'missing')} in the configuration; give the run's own config.yaml."
            )


def _differences(record: dict[str, object], environment: Environment, data_fingerprint: str) -> list[str]:
    before, now = record["environment"], asdict(environment)
    assert isinstance(before, dict)
    found = [f"{key} {before.get(key)}, now {value}" for key, value in now.items() if before.get(key) != value]
    return found + (["other data or another base model"] if record["data"] != data_fingerprint else [])
