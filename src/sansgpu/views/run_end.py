"""Prints the end of a run: its loss curve, samples of the model, and the commands to use it."""

from __future__ import annotations

import re
import shlex

from rich.console import Console
from rich.text import Text

from sansgpu.config import import_class
from sansgpu.events.record import RunRecord
from sansgpu.tasks.capabilities import can
from sansgpu.views.loss_curve import TRAINING, VALIDATION, loss_curve, loss_point

CURVE_COLUMNS, CURVE_ROWS = 76, 12
SAMPLE_LINES = 6
_STYLE = "bold"


def print_run_end(console: Console, record: RunRecord) -> None:
    """Prints what a finished run learned, where its report is, and what to do next."""
    _print_curve(console, record)
    _print_samples(console, record)
    if record.paths.report.is_file():
        console.print(Text.assemble(("\nReport: ", _STYLE), str(record.paths.report)), soft_wrap=True)
    console.print(Text("\nNext:", _STYLE))
    for command in commands(record):
        console.print(Text(f"  {command}"), soft_wrap=True)


def commands(record: RunRecord) -> list[str]:
    """Returns the commands that use the model of a run, the most typical one first."""
    run, use = shlex.quote(str(record.paths.root)), _use(record)
    found = [_with_prompt(use, record).replace("MODEL", run)] if use else []
    found += [] if use.startswith("sansgpu eval ") else [f"sansgpu eval {run}"]
    return [*found, f"sansgpu export {run} --format {'gguf' if _exports_gguf(record) else 'hf'}"]


def _use(record: RunRecord) -> str:
    """Returns the command that the task declares for its models, with the placeholder `MODEL`, or ""."""
    card = record.settings.card
    return card(record.section("model")).command if card else ""


def _with_prompt(command: str, record: RunRecord) -> str:
    """Returns the command with the prompt of the run's samples."""
    prompt = record.section("training").get("sample_prompt")
    if not (isinstance(prompt, str) and prompt.isprintable() and prompt):
        return command
    return re.sub(r'--prompt "[^"]*"', lambda _: f"--prompt {shlex.quote(prompt)}", command)


def _exports_gguf(record: RunRecord) -> bool:
    """Returns whether the task writes GGUF files. A class outside the package is not imported to find out."""
    implementation = record.settings.implementation
    return implementation != "" and can(import_class(implementation), "gguf")


def _print_curve(console: Console, record: RunRecord) -> None:
    training = [point for event in record.steps for point in loss_point(event)]
    validation = [point for event in record.evaluations if event["step"] for point in loss_point(event)]
    if len(training) < 2:
        return
    title = Text.assemble(("\nLoss", _STYLE), ": ", ("training", TRAINING))
    console.print(title + Text.assemble(", ", ("validation", VALIDATION)) if validation else title)
    console.print(loss_curve(training, validation, None, min(CURVE_COLUMNS, console.width), CURVE_ROWS))


def _print_samples(console: Console, record: RunRecord) -> None:
    """Prints the first sample, usually from before training, one from half-way, and the last one."""
    sampled = [event for event in record.evaluations if event.get("sample")]
    if not sampled:
        return
    prompt, last = str(record.section("training").get("sample_prompt") or ""), sampled[-1]["step"]
    answers = _use(record).startswith("sansgpu chat ")
    asked = f", asked {prompt!r}" if answers and prompt else ""
    console.print(Text(f"\nWhat the model writes{asked}", _STYLE))
    half = min(sampled, key=lambda event: abs(2 * event["step"] - last))
    for event in {event["step"]: event for event in (sampled[0], half, sampled[-1])}.values():
        console.print(Text("  before training" if not event["step"] else f"  after step {event['step']:,}", "dim"))
        text = str(event["sample"]) if answers else prompt + str(event["sample"])
        for line in text.strip("\n").splitlines()[:SAMPLE_LINES]:
            console.print(Text(f"    {line}"), soft_wrap=True)
