"""What the live view costs: one run whose view is switched on and off, block by block of steps.

    python -m benchmarks.live_view [--blocks 30] [--columns 160]

Both halves are of one process and one run, so that what else the machine does meets both. The view draws into a
pseudo-terminal that somebody reads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
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


class Switched(LiveView):
    """Draws while `on`."""

    on = True
    frames = 0
    cpu_seconds = 0.0  # of its thread

    def _draw(self) -> None:
        if self.on:
            self.frames += 1
            super()._draw()
            self.cpu_seconds = time.thread_time()


class Clock(Callback):
    """Notes every step's seconds, and switches the view after each block."""

    def __init__(self, view: Switched, blocks: int, steps: int) -> None:
        self._view, self._blocks, self._steps = view, blocks, steps
        self._block: list[float] = []
        self.medians: dict[bool, list[float]] = {True: [], False: []}

    def on_step(self, event: Event, run: Controls) -> None:
        """One more step."""
        self._block.append(event["step_seconds"])
        if len(self._block) == self._steps:
            if event["step"] > 2 * self._steps:  # the first two warm up
                self.medians[self._view.on].append(median(self._block[1:]))
            self._block, self._view.on = [], not self._view.on
            if sum(map(len, self.medians.values())) >= self._blocks:
                run.stop()


def main() -> None:
    """Measure, and print the ratio of the blocks' medians, each with the one behind it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="by default the built-in configuration")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=12, help="a block's; its first is not counted")
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
        view = Switched(console, request.controls, request.monitor.latest)
        clock = Clock(view, asked.blocks, asked.steps)
        quiet = PreparationBar(Console(stderr=True))
        began = time.monotonic()
        train(request, [quiet, view, Callbacks(clock, request.controls)], quiet)
        view.close()
    result = _result(clock.medians, view, time.monotonic() - began)
    print(f"step without the view {result['without_seconds']:.4f} s, with it {result['with_seconds']:.4f} s")
    low, high = result["middle_half"]
    print(f"{result['pairs']} pairs of blocks: speed with over without, median {result['ratio']:.4f}, middle half "
          f"{low:.4f} to {high:.4f}; {result['pictures']} pictures in {result['seconds']:.0f} s, "
          f"{result['core_share']:.2%} of a core")  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")


def _read(end: int) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while os.read(end, 65536):
            pass


def _result(medians: dict[bool, list[float]], view: Switched, seconds: float) -> dict[str, Any]:
    pairs = list(zip(medians[False], medians[True], strict=False))
    ratios = sorted(without / with_ for without, with_ in pairs)
    return {
        "without_seconds": median(medians[False]),
        "with_seconds": median(medians[True]),
        "pairs": len(ratios),
        "ratio": median(ratios),
        "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "pictures": view.frames,
        "core_share": 2 * view.cpu_seconds / seconds,  # it is on for half of the time
        "seconds": seconds,
        "machine": describe_machine(),
    }


if __name__ == "__main__":
    main()
