"""Taking up a snapshot, and saying where it cannot be exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from sansgpu.config import ConfigError
from sansgpu.machine.probe import Environment
from sansgpu.train.checkpoint import Snapshot
from sansgpu.train.state import Progress, TrainState


def restore(
    state: TrainState,
    snapshot: Snapshot,
    environment: Environment,
    data_fingerprint: str,
    strict: bool,
    warn: Callable[[str], None],
) -> dict[str, float] | None:
    """Load weights, moments and progress into `state`; returns the metrics of that step where it was evaluated.

    Raises ConfigError where the model has another shape; where the environment or the data differ, which changes
    bits, it warns, or with `strict` raises.
    """
    record, weights = snapshot.state(), snapshot.weights()
    _require_same_shape(state, weights, snapshot)
    moments = snapshot.moments()
    if moments.keys() != state.optimizer.state_names():
        raise ConfigError(f"{snapshot.folder} was made with another optimizer; set training.optimizer as it was.")
    for difference in _differences(record, environment, data_fingerprint):
        message = f"{snapshot.folder.name} was made with {difference}: the resumed run will differ in its last bits."
        if strict:
            raise ConfigError(f"{message} Without --strict it would go on.")
        warn(message)
    state.load_weights(weights)
    state.progress = Progress.from_json(record["progress"])
    state.optimizer.load_state_tensors(moments)
    metrics: dict[str, float] | None = record["metrics"]
    return metrics


def recorded_environment(snapshot: Snapshot) -> Environment:
    """What the snapshot's run computed with."""
    return Environment(**snapshot.state()["environment"])


def _require_same_shape(state: TrainState, weights: dict[str, torch.Tensor], snapshot: Snapshot) -> None:
    ours = {name: tuple(tensor.shape) for name, tensor in state.weights().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
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
