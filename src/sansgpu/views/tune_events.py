"""Events and results of a hyperparameter search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sansgpu.config.metrics import BITS_PER_BYTE, LOSS

Parameters = dict[str, Any]  # values of a trial by configuration key


@dataclass(frozen=True)
class SearchEstimate:
    """Search space and estimated time. Seconds and `finish` are None if no trial could be timed."""

    space: dict[str, str]
    trials: int | None
    trial_seconds: float | None
    seconds: float | None
    finish: str | None  # ISO 8601


@dataclass(frozen=True)
class SearchBegin:
    """A search was started or resumed."""

    folder: str
    finished: int  # trials
    evaluations: int  # number in each trial
    evaluations_changed: bool  # True if the configuration asks for another number
    estimate: SearchEstimate


@dataclass(frozen=True)
class TrialBegin:
    """A trial was started, or resumed from `step`."""

    trial: int
    parameters: Parameters
    resumed: bool
    step: int


@dataclass(frozen=True)
class TrialStep:
    """A trial made a step."""

    trial: int
    step: int
    total_steps: int | None
    loss: float


@dataclass(frozen=True)
class TrialEnd:
    """A trial ended. `left` estimates the rest of the search."""

    trial: int
    state: str
    loss: float | None
    parameters: Parameters
    seconds: float
    why: str | None
    best: tuple[int, float] | None  # trial and loss
    finished: int
    left: SearchEstimate


SearchEvent = SearchBegin | TrialBegin | TrialStep | TrialEnd


@dataclass(frozen=True)
class TrialRow:
    """One trial in the result of a search."""

    trial: int
    state: str
    loss: float | None
    bits_per_byte: float | None
    step: int | None
    parameters: Parameters
    seconds: float
    why: str | None


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search, best first."""

    name: str
    task: str
    measure: str
    folder: str
    best: TrialRow
    default: TrialRow | None  # the unchanged configuration
    gain: float | None  # relative decrease of the loss from the unchanged configuration to the best trial
    importance: dict[str, float]
    seconds: float
    trials: list[TrialRow]
    files: list[str]

    @property
    def measure_label(self) -> str:
        return next(metric.label for metric in (LOSS, BITS_PER_BYTE) if metric.name == self.measure)

    @property
    def keys(self) -> list[str]:
        """The keys that any trial changed."""
        return list(dict.fromkeys(key for row in self.trials for key in row.parameters))
