"""What the live view costs: steps in which a picture was drawn, beside the steps around them.

    python -m benchmarks.live_view [--pictures 60] [--columns 160]

All of one process and one run. Two runs, or blocks of one with the view on and off, differ by per cents here for other
reasons, and the view may cost 0.5; a step's neighbours, a second before and after, have met the same machine. The view
draws into a pseudo-terminal that somebody reads.
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
from sansgpu.config import load_config
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.watch.callbacks import Callback, Callbacks
from sansgpu.watch.controls import Controls
from sansgpu.watch.events import Event
from sansgpu.watch.live import LiveView
from sansgpu.watch.terminal import PreparationBar

WARMING = 20  # steps that are not looked at
AROUND = 4  # steps on each side that a step is compared with


class Counted(LiveView):
    """Counts its pictures."""

    pictures = 0

    def _draw(self) -> None:
        super()._draw()
        self.pictures += 1


class Clock(Callback):
    """Notes every step's seconds, and how many pictures there were by its end."""

    def __init__(self, view: Counted, pictures: int) -> None:
        self._view, self._pictures = view, pictures
        self.steps: list[tuple[float, int]] = []

    def on_step(self, event: Event, run: Controls) -> None:
        """One more step."""
        self.steps.append((event["step_seconds"], self._view.pictures))
        if self._view.pictures - self.steps[min(WARMING, len(self.steps)) - 1][1] >= self._pictures:
            run.stop()


def main() -> None:
    """Measure, and print how much longer a step with a picture takes, and what that is of all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="by default the built-in configuration")
    parser.add_argument("--pictures", type=int, default=60)
    parser.add_argument("--columns", type=int, default=160)
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    main_end, other_end = pty.openpty()
    threading.Thread(target=_read, args=(main_end,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(other_end, "w") as terminal:
        console = Console(file=terminal, width=asked.columns, height=asked.columns // 4, force_terminal=True)
        overrides = ("training.logging_steps=1", "training.max_steps=100000", "training.eval_steps=0",
                     "training.save_steps=0", "training.report_to=none")  # fmt: skip
        config = load_config(asked.config, (*overrides, *asked.set))[0]
        request = TrainRequest(config=config, output_dir=Path(folder) / "run")
        view = Counted(console, request.controls, request.monitor.latest)
        clock = Clock(view, asked.pictures)
        quiet = PreparationBar(Console(stderr=True))
        train(request, [quiet, view, Callbacks(clock, request.controls)], quiet)
        view.close()
    result = _result(clock.steps)
    print(f"a step takes {result['step_seconds']:.4f} s; with a picture {result['extra_seconds'] * 1e3:.2f} ms more "
          f"(standard error {result['standard_error'] * 1e3:.2f}), {result['pictures']} pictures")  # fmt: skip
    print(f"a picture every {result['seconds_between']:.1f} s: speed with the view over without {result['ratio']:.4f}")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")


def _read(end: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(end, 65536):
            pass


def _result(steps: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = [step[0] for step in steps]
    drawn = [place for place in range(1, len(steps)) if steps[place][1] > steps[place - 1][1]]
    busy = set(drawn)
    extra = []
    for place in drawn:
        if WARMING <= place < len(steps) - AROUND:
            beside = range(place - AROUND, place + AROUND + 1)
            extra.append(seconds[place] - median(seconds[other] for other in beside if other not in busy))
    told = seconds[WARMING:]
    between = sum(told) / len(extra)
    return {
        "step_seconds": median(told),
        "pictures": len(extra),
        "extra_seconds": mean(extra),
        "standard_error": stdev(extra) / len(extra) ** 0.5,
        "seconds_between": between,
        "ratio": 1 - mean(extra) / between,
        "machine": describe_machine(),
    }


if __name__ == "__main__":
    main()
