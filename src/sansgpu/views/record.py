"""Reads the files of a run, for reports, run lists and model cards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, RunPaths, TaskSettings, require_identity
from sansgpu.config.paths import not_a_run
from sansgpu.config.plain_data import InvalidDataError, unreadable
from sansgpu.events.event import Event
from sansgpu.events.jsonl import read_record
from sansgpu.events.schema import RecordedEnvironment
from sansgpu.files.marks import read_mark
from sansgpu.files.reading import read_validated
from sansgpu.tasks.configuration import recorded_values, selected_settings


def seconds_of(events: Iterable[Event]) -> float:
    """Returns the total run time of all processes of a run."""
    return max((e.get("elapsed_seconds") or e.get("seconds") or 0.0 for e in events), default=0.0)


@dataclass(frozen=True)
class RunRecord:
    """The configuration, environment and events of a run, which may still be running. Weights are not read."""

    paths: RunPaths
    config: dict[str, Any]  # resolved, by section
    environment: dict[str, Any]
    events: list[Event]
    problem: str | None = None  # a sentence about invalid lines of metrics.jsonl

    @classmethod
    def read(cls, paths: RunPaths) -> RunRecord:
        """Reads a run. Raises ConfigError if the folder is not a run or its files are invalid."""
        if not paths.config.exists():
            raise not_a_run(paths.root)
        config = recorded_values(paths.config)
        file = paths.environment
        try:
            environment = read_validated(file, RecordedEnvironment) if file.exists() else {}
            file = paths.metrics
            events, problem = read_record(file)
        except OSError as error:
            raise unreadable(file, error) from None
        except InvalidDataError as error:
            raise ConfigError(f"{file} is damaged: {error}; restore it from a backup, or delete it.") from None
        return cls(paths, config, environment, events, problem)

    @classmethod
    def open(cls, folder: Path) -> RunRecord:
        """Reads the run in a folder, with the snapshot and log folders that it configures. Raises ConfigError."""
        record = cls.read(RunPaths(folder))
        if (mark := read_mark(folder)) and mark.configuration:
            require_identity(record.paths.config, record.config, [mark.configuration])
        training = record.section("training")
        return replace(record, paths=RunPaths.of(folder, training.get("checkpoint_dir"), training.get("logging_dir")))

    def section(self, name: str) -> dict[str, Any]:
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @cached_property
    def settings(self) -> TaskSettings:
        """The settings that the run's task declares."""
        return selected_settings(self.config)

    @property
    def name(self) -> str:
        return self.paths.root.absolute().name

    def events_named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    @cached_property
    def start(self) -> Event:
        """The start event, or an empty dict."""
        return next(iter(self.events_named("start")), {})

    @cached_property
    def steps(self) -> list[Event]:
        return self.events_named("step")

    @cached_property
    def evaluations(self) -> list[Event]:
        return self.events_named("eval")

    @property
    def best(self) -> Event | None:
        """The evaluation with the lowest finite loss."""
        scored = [event for event in self.evaluations if event["loss"] is not None]
        return min(scored, key=lambda event: float(event["loss"]), default=None)

    @property
    def end_reason(self) -> str | None:
        """done, interrupted, out_of_time or early_stopping; None if the run is active or was killed."""
        return str(self._end["reason"]) if self._end else None

    @property
    def final_step(self) -> int | None:
        """The step whose weights final/ has; None if it is not written, or written by an older version."""
        return self._end.get("final_step")

    @property
    def _end(self) -> Event:
        """The end event, or an empty dict. A resumed run removes that of the interrupted process."""
        return next(reversed(self.events_named("end")), {})

    @property
    def step(self) -> int:
        """The last recorded step."""
        return max((event.get("step") or 0 for event in self.events), default=0)

    @property
    def total_steps(self) -> int | None:
        """The planned steps according to the last step event, or the expected ones before the first."""
        last = self.steps[-1] if self.steps else self.start
        return last.get("expected_steps") or last.get("total_steps")

    @property
    def seconds(self) -> float:
        return seconds_of(self.events)

    @property
    def joules(self) -> float | None:
        """Energy of the processors during the recorded steps; None if the machine does not report power."""
        counted, before = 0.0, 0.0
        for event in self.steps:
            watts, elapsed = (event.get("system") or {}).get("watts"), event.get("elapsed_seconds")
            if watts is not None and elapsed is not None:  # an event without power counts toward the next one
                counted, before = counted + watts * (elapsed - before), elapsed
        return counted or None
