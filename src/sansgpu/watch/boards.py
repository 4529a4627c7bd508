"""TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.watch.events import Event


def require_boards(names: list[str]) -> None:
    """Raise ConfigError where a board that was asked for is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"training.report_to names {name}, which is missing; pip install 'sansgpu[{name}]'.")


def _scalars(event: Event) -> dict[str, float]:
    part = {"step": "train", "eval": "validation"}.get(event["event"])
    if part is None:
        return {}
    named = [(part, event), ("system", event.get("system") or {}), ("phase_seconds", event.get("phase_seconds") or {})]
    return {
        f"{group}/{key}": value
        for group, values in named
        for key, value in values.items()
        if isinstance(value, (int, float)) and key != "step"
    }


class TensorBoard:
    """Scalars of step and eval events, and samples as text."""

    def __init__(self, folder: Path, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only where it is asked for: it costs start-up time

        purge = None if resumed_step is None else resumed_step + 1  # what a killed run wrote behind its snapshot
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def emit(self, event: Event) -> None:
        """Write one event's numbers."""
        for name, value in _scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])
        if event.get("sample"):
            self._writer.add_text("sample", event["sample"], event["step"])

    def close(self) -> None:
        """Flush to disk."""
        self._writer.close()


class WeightsAndBiases:
    """The same numbers to wandb, which must be installed (`pip install 'sansgpu[wandb]'`)."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project="sansgpu", name=name, id=name, dir=str(folder), config=config, resume="allow")

    def emit(self, event: Event) -> None:
        """Log one event's numbers."""
        if scalars := _scalars(event):
            self._run.log(scalars, step=event["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
