"""`sansgpu train --headless` as a contestant: a real process, read through its events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contest import WARM_UP, Contestant, Event, NoResultError, Outcome, Sample
from sansgpu.machine.compilation import missing_for_compile

# What a run of a few steps needs to be compared: an event a step, and nothing beside the steps.
MEASURED = {
    "training.logging_steps": 1,
    "training.save_steps": 0,
    "training.keep_last": 1,
    "training.eval_steps": 0,
    "training.eval_batches": 1,
    "training.report_to": "none",
    "training.lr_scheduler": "constant",
    "training.warmup_steps": 0,
    "training.window_warmup_ratio": 0,
    "device": "cpu",
}


def overrides(settings: dict[str, object]) -> list[str]:
    """Changes of a configuration, as every command takes them."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def command(output: Path, settings: dict[str, object], config: str | Path | None = None) -> list[str]:
    """The command line of a run; `config` is a file or a preset."""
    file = [str(config)] if config else []
    return [
        sys.executable,
        "-m",
        "sansgpu",
        "train",
        *file,
        "--headless",
        "--output-dir",
        str(output),
        *overrides(settings),
    ]


def compile_setting(wanted: bool) -> str:
    """As a long run would have it: `auto` would look at the few steps measured."""
    return "on" if wanted and missing_for_compile() is None else "off"


def contestant(name: str, output: Path, settings: dict[str, object], steps: int) -> Contestant:
    """A run of `steps` steps behind the warm-up, stopped after the last: what it would save is not compared."""
    total = WARM_UP + steps
    settings = {**MEASURED, "training.max_steps": total, **settings}
    return Contestant(name, command(output, settings), sample, until=at_step(total))


def at_step(last: int) -> Callable[[Event], bool]:
    """Whether an event is that step's."""
    return lambda event: event.get("event") == "step" and int(event["step"]) >= last


def sample(outcome: Outcome) -> Sample:
    """The measured steps. Raises NoResultError."""
    steps = [event for _, event in outcome.named("step")]
    if len(steps) <= WARM_UP:
        raise NoResultError(f"only {len(steps)} steps were made")
    return Sample(
        step_seconds=[step["step_seconds"] for step in steps[WARM_UP:]],
        first_step_seconds=steps[0]["step_seconds"],
        peak_rss_bytes=outcome.peak_rss_bytes,
        loss=steps[-1]["loss"],
        wall_seconds=outcome.wall_seconds,
    )
