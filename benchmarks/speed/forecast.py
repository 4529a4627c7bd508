"""Compares the duration that `plan` predicts with the actual one: `python -m benchmarks.speed.forecast --minutes 5`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import ours
from benchmarks.contest import Row, print_table, row_of, say, spawn, write_json
from benchmarks.sizes import SIZES

Settings = dict[str, object]

M80: Settings = {**SIZES["m80"].model_keys(), "training.optimizer": "adamw", "training.learning_rate": 0.0006}
# name: (configuration, changes to it)
RUNS: dict[str, tuple[str, Settings]] = {
    "default": ("configs/default.yaml", {}),
    "cpu_small": ("configs/cpu_small.yaml", {"data.dataset_name": "python-stdlib", "training.num_epochs": "null"}),
    "small": ("small", {"training.gradient_accumulation_steps": 16}),
    "m80": ("configs/default.yaml", M80),
}
QUICK: dict[str, tuple[str, Settings]] = {"toy": ("configs/tiny.yaml", {})}
COLUMNS = {
    "run": ("name", "s"),
    "steps": ("steps", ",d"),
    "planned s": ("planned_seconds", ".0f"),
    "measured s": ("measured_seconds", ".0f"),
    "planned over measured": ("error", "+.1%"),
    "step alone": ("step_error", "+.1%"),
}


def plan(config: str, settings: Settings) -> Row:
    """Returns the result of `plan`. Raises NoResultError if it fails."""
    outcome = spawn([sys.executable, "-m", "sansgpu", "plan", config, *ours.overrides(settings), "--json"])
    if outcome.code or not outcome.events:
        raise outcome.no_result()
    return outcome.events[-1][1]


def measure(name: str, config: str, settings: Settings, minutes: float) -> Row:
    """Plans a run of about `minutes` and runs it. Raises NoResultError if either fails."""
    # The plan of a long run gives the number of steps for `minutes`.
    first = plan(config, {**settings, "training.max_steps": 10_000})
    settings = {**settings, "training.max_steps": max(3, round(minutes * 60 / first["step_seconds"]))}
    planned = plan(config, settings)
    with tempfile.TemporaryDirectory(prefix="sansgpu-forecast-") as folder:
        outcome = spawn(ours.command(Path(folder) / "run", settings, config))
    if outcome.code:
        raise outcome.no_result()
    steps = [event["step_seconds"] for _, event in outcome.named("step")]
    say(json.dumps({"name": name, "planned": planned["total_seconds"], "measured": outcome.wall_seconds}))
    return {
        "name": name,
        "steps": planned["total_steps"],
        "planned_seconds": planned["total_seconds"],
        "measured_seconds": outcome.wall_seconds,
        "error": planned["total_seconds"] / outcome.wall_seconds - 1,
        "step_error": planned["step_seconds"] / mean(steps) - 1,
        "plan": planned,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.forecast", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="duration of each run (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="use a toy size, to test the benchmark itself")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rows: list[Row] = []
    for name, (config, settings) in (QUICK if args.quick else RUNS).items():
        say(name)
        rows.append(row_of(name, partial(measure, name, config, settings, args.minutes)))
    print_table(f"Runs of about {args.minutes:g} minutes, from the start of the process to its end", COLUMNS, rows)
    write_json(args.json, "forecast", vars(args), rows)


if __name__ == "__main__":
    main()
