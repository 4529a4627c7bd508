"""The metrics of a task: their names in events, and how reports and the terminal show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A metric in the eval events of a task. With the defaults, it is shown as a plain number."""

    name: str  # key in events
    label: str = ""  # default: the name in words
    form: str = "{:.4f}"  # format of the value in the terminal and the live view
    text: str = "{label} {value}"  # template of the terminal; may name other keys of the event; "": not shown there
    within: str = ""  # name of the metric in whose parentheses the terminal shows this one
    unit: str = ""  # unit of the values in reports
    scale: float = 1.0  # factor from the value in events to the unit
    better: Literal["lower", "higher"] = "lower"
    short: str = ""  # label of the current value in step lines and the live view; "": not shown there
    reported: bool = True  # whether reports, plots and model cards show it
    plotted: bool = True  # False if its curve has the shape of the loss
    baseline: str = ""  # name of the metric that a predictor without a model reaches
    remedies: tuple[str, ...] = ()  # keys to double if the metric stays near its baseline

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def title(self) -> str:
        """The label for reports, with the unit if it is per cent."""
        return f"{self.label} (%)" if self.unit == "%" else self.label

    def number(self, value: Any) -> float | None:
        """Converts a value of an event to the metric's unit. Returns None if it is not a number."""
        return self.scale * value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def words(self, event: Mapping[str, Any]) -> str:
        """Returns the text of an event's value for the terminal."""
        if event[self.name] is None:
            return f"{self.label} not finite"
        return self.text.format(**{**event, "label": self.label, "value": self.form.format(event[self.name])})


def percentage(name: str, label: str, short: str = "") -> Metric:
    """Describes a score that events record in per cent."""
    return Metric(name, label, "{:.2f} %", unit="%", better="higher", short=short)


def interval(name: str, within: str) -> Metric:
    return Metric(name, "95 % interval", "{0[0]:.1%} to {0[1]:.1%}", within=within, reported=False)


LOSS = Metric("loss")  # every task has it
BITS_PER_BYTE = Metric("bits_per_byte", text="{value} {label}", short="bits per byte")  # comparable across vocabularies


def share(name: str, label: str = "", short: str = "", within: str = "") -> Metric:
    """Describes a score between 0 and 1 that is shown in per cent."""
    return Metric(name, label, "{:.1%}", unit="%", scale=100.0, better="higher", short=short, within=within)
