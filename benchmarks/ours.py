"""`sansgpu train --headless` as a contestant: a separate process, measured by its events."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contest import WARM_UP, Contestant, Event, NoResultError, Outcome, Sample

# Settings of a short measured run: an event per step, and no evaluations or snapshots.
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


def setting(text: str) -> tuple[str, str]:
    """Parses KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not KEY=VALUE")
    return key, value


def overrides(settings: dict[str, object]) -> list[str]:
    """Returns settings as --set arguments."""
    return [part for change in assignments(settings) for part in ("--set", change)]


def assignments(settings: dict[str, object]) -> list[str]:
    """Returns settings as KEY=VALUE."""
    return [f"{key}={value}" for key, value in settings.items()]


def command(output: Path, settings: dict[str, object], config: str | Path | None = None) -> list[str]:
    """Returns the command line of a run; `config` is a file or a preset."""
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


def contestant(name: str, output: Path, settings: dict[str, object], steps: int) -> Contestant:
    """Returns a run of `steps` steps after the warm-up, killed after the last step, before it saves."""
    total = WARM_UP + steps
    settings = {**MEASURED, "training.max_steps": total, **settings}
    return Contestant(name, command(output, settings), sample, until=at_step(total))


def at_step(last: int) -> Callable[[Event], bool]:
    """Returns a function that recognizes the event of step `last`."""
    return lambda event: event.get("event") == "step" and int(event["step"]) >= last


def sample(outcome: Outcome) -> Sample:
    """Returns the measured steps. Raises NoResultError if there are none."""
    steps = [event for _, event in outcome.named("step")]
    if len(steps) <= WARM_UP:
        raise NoResultError(f"the run ended after {len(steps)} steps")
    return Sample(
        step_seconds=[step["step_seconds"] for step in steps[WARM_UP:]],
        first_step_seconds=steps[0]["step_seconds"],
        peak_rss_bytes=outcome.peak_rss_bytes,
        loss=steps[-1]["loss"],
        wall_seconds=outcome.wall_seconds,
    )
