"""Taking up a snapshot, and saying where it cannot be exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial

import torch

from sansgpu.config import ConfigError
from sansgpu.machine.group import ALONE, Group
from sansgpu.machine.probe import Environment
from sansgpu.train.checkpoint import MOMENTS, WEIGHTS, Snapshot
from sansgpu.train.state import Progress, TrainState
from sansgpu.train.tensor_file import TYPES


def restore(
    state: TrainState,
    snapshot: Snapshot,
    environment: Environment,
    data_fingerprint: str,
    strict: bool,
    warn: Callable[[str], None],
    group: Group = ALONE,
) -> dict[str, float] | None:
    """Load weights, moments and progress into `state`; returns the metrics of that step where it was evaluated.

    Rank 0 reads, and hands each tensor to all others, who keep what is theirs: so a snapshot fits any number of ranks,
    and hosts need not share a disk. Raises ConfigError where the model has another shape; where the environment or the
    data differ, which changes bits, it warns, or with `strict` raises.
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
    state.progress = Progress.from_json(record["progress"])
    metrics: dict[str, float] | None = record["metrics"]
    return metrics


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
