"""What a run has left in its folder, read back: the one source of reports, lists and model cards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, RunPaths, recorded_values, require_identity
from sansgpu.config.plain import FlawError, read_json
from sansgpu.watch.event_schema import Environment
from sansgpu.watch.events import Event
from sansgpu.watch.jsonl import read_record
from sansgpu.watch.marks import read_mark


def seconds_of(events: Iterable[Event]) -> float:
    """That a run has taken, over all its processes, by its record."""
    return max((e.get("elapsed_seconds") or e.get("seconds") or 0.0 for e in events), default=0.0)


@dataclass(frozen=True)
class Record:
    """A run as its files tell it. Reading it takes no weights, and a run may go on meanwhile."""

    paths: RunPaths
    config: dict[str, Any]  # by section, as resolved
    environment: dict[str, Any]
    events: list[Event]
    problem: str | None = None  # a sentence about lines of metrics.jsonl that were left out

    @classmethod
    def read(cls, paths: RunPaths) -> Record:
        """Raises ConfigError where the folder holds no run, or its files are broken."""
        if not paths.config.exists():
            raise ConfigError(f"{paths.root} is no run: it has no config.yaml.")
        config = recorded_values(paths.config)
        file = paths.environment
        try:
            environment = read_json(file, Environment) if file.exists() else {}
            file = paths.metrics
            events, problem = read_record(file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
        except FlawError as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from None
        return cls(paths, config, environment, events, problem)

    @classmethod
    def open(cls, folder: Path) -> Record:
        """The run in a folder, its snapshots wherever they lie. Raises ConfigError as `read` does."""
        record = cls.read(RunPaths(folder))
        if (mark := read_mark(folder)) and mark.configuration:
            require_identity(record.paths.config, record.config, [mark.configuration])
        training = record.section("training")
        return replace(record, paths=RunPaths.of(folder, training.get("checkpoint_dir"), training.get("logging_dir")))

    def section(self, name: str) -> dict[str, Any]:
        """model, training or data of the configuration."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.paths.root.absolute().name

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def start(self) -> Event:
        """The run's start event; empty where it has none yet."""
        return next(iter(self.of("start")), {})

    @cached_property
    def steps(self) -> list[Event]:
        """Step events."""
        return self.of("step")

    @cached_property
    def evaluations(self) -> list[Event]:
        """Evaluations."""
        return self.of("eval")

    @property
    def best(self) -> Event | None:
        """The evaluation with the lowest loss; a loss that was not finite is None and never the lowest."""
        scored = [event for event in self.evaluations if event["loss"] is not None]
        return min(scored, key=lambda event: float(event["loss"]), default=None)

    @property
    def ending(self) -> str | None:
        """done, interrupted or out_of_time; None where the run goes on, or was killed."""
        ends = self.of("end")  # a run that goes on cuts it off
        return str(ends[-1]["reason"]) if ends else None

    @property
    def step(self) -> int:
        """The last one that is told of."""
        return max((event.get("step") or 0 for event in self.events), default=0)

    @property
    def total_steps(self) -> int | None:
        """As the last step event knows it."""
        told = [event.get("total_steps") for event in (self.start, *self.steps)]
        return told[-1] if told else None

    @property
    def seconds(self) -> float:
        """That the run has taken, over all its processes."""
        return seconds_of(self.events)

    @property
    def joules(self) -> float | None:
        """That the processors used in the steps told of; None where the machine does not say."""
        counted, before = 0.0, 0.0
        for event in self.steps:
            watts, elapsed = (event.get("system") or {}).get("watts"), event.get("elapsed_seconds")
            if watts is not None and elapsed is not None:  # one that does not say is taken for the next
                counted, before = counted + watts * (elapsed - before), elapsed
        return counted or None
