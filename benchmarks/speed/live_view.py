"""Measures the cost of the live view: compares steps in which it was drawn with the steps around them.

    python -m benchmarks.speed.live_view [--pictures 60] [--columns 160]

All steps are from one run in one process. Separate runs, or blocks of a run with and without the view, would differ by
several percent for other reasons, while the view costs about 0.5%. Steps within seconds of each other run under the
same conditions. The view draws to a pseudo-terminal that a thread reads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import tempfile
import threading
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console

from benchmarks.contest import describe_machine
from sansgpu.events.controls import Controls
from sansgpu.events.event import Event
from sansgpu.events.loggers import Callback, CallbackSink
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.tasks.configuration import load_config
from sansgpu.views.live import LiveView
from sansgpu.views.terminal import PreparationBar

WARM_UP = 20  # unmeasured first steps
NEIGHBORS = 4  # steps on each side that a step is compared with


class Counted(LiveView):
    """A live view that counts how often it was drawn."""

    pictures = 0

    def _draw(self) -> None:
        super()._draw()
        self.pictures += 1


class Clock(Callback):
    """Records the duration of every step and the number of redraws so far. Stops the run after enough redraws."""

    def __init__(self, view: Counted, pictures: int) -> None:
        self._view, self._pictures = view, pictures
        self.steps: list[tuple[float, int]] = []

    def on_step(self, event: Event, run: Controls) -> None:
        self.steps.append((event["step_seconds"], self._view.pictures))
        if self._view.pictures - self.steps[min(WARM_UP, len(self.steps)) - 1][1] >= self._pictures:
            run.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="default: the built-in configuration")
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--columns", type=int, default=160)
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    main_end, other_end = pty.openpty()
    threading.Thread(target=_read, args=(main_end,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(other_end, "w") as terminal:
        console = Console(file=terminal, width=args.columns, height=args.columns // 4, force_terminal=True)
        overrides = ("training.logging_steps=1", "training.max_steps=100000", "training.eval_steps=0",
                     "training.save_steps=0", "training.report_to=none")  # fmt: skip
        config = load_config(args.config, (*overrides, *args.set))[0]
        request = TrainRequest(config=config, output_dir=Path(folder) / "run")
        view = Counted(console, request.controls, request.monitor.latest)
        clock = Clock(view, args.pictures)
        quiet = PreparationBar(Console(stderr=True))
        train(request, [quiet, view, CallbackSink(clock, request.controls)], quiet)
        view.close()
    result = _result(clock.steps)
    print(f"a step takes {result['step_seconds']:.4f} s; a redraw adds {result['extra_seconds'] * 1e3:.2f} ms "
          f"(standard error {result['standard_error'] * 1e3:.2f}, {result['pictures']} redraws)")  # fmt: skip
    print(f"the view is redrawn every {result['seconds_between']:.1f} s: {result['ratio']:.4f} of the speed without it")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def _read(end: int) -> None:
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(end, 65536):
            pass


def _result(steps: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = [step[0] for step in steps]
    drawn = [place for place in range(1, len(steps)) if steps[place][1] > steps[place - 1][1]]
    busy = set(drawn)
    extra = []
    for place in drawn:
        if WARM_UP <= place < len(steps) - NEIGHBORS:
            nearby = range(place - NEIGHBORS, place + NEIGHBORS + 1)
            extra.append(seconds[place] - median(seconds[other] for other in nearby if other not in busy))
    measured = seconds[WARM_UP:]
    between = sum(measured) / len(extra)
    return {
        "step_seconds": median(measured),
        "pictures": len(extra),
        "extra_seconds": mean(extra),
        "standard_error": stdev(extra) / len(extra) ** 0.5,
        "seconds_between": between,
        "ratio": 1 - mean(extra) / between,
        "machine": describe_machine(),
    }


if __name__ == "__main__":
    main()
