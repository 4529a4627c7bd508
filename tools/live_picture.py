"""Draws the live view of a recorded run as an SVG file, such as docs/live.svg.

    python -m tools.live_picture runs/default docs/live.svg [--step 400] [--columns 120]

The events of the run's metrics.jsonl are replayed through the package's own live view, up to a step of the run.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from sansgpu.config import RunPaths
from sansgpu.events.controls import Controls
from sansgpu.events.event import Event
from sansgpu.events.jsonl import read_events
from sansgpu.views.live import LiveView
from sansgpu.views.live_screen import screen

ROWS_PER_COLUMN = 0.27
# Colors that are legible on white and on black pages: background, text, eight colors, eight bright colors.
_COLORS = [(22, 27, 34), (248, 81, 73), (63, 185, 80), (210, 153, 34), (88, 166, 255), (219, 97, 219), (57, 197, 207)]
THEME = TerminalTheme((22, 27, 34), (230, 237, 243), [*_COLORS, (230, 237, 243)], [*_COLORS, (255, 255, 255)])


class RecordedView(LiveView):
    """A live view that is fed with recorded events and never opens a terminal."""

    def picture(self, events: list[Event], console: Console) -> RenderableType:
        now, last = time.monotonic(), _elapsed(events[-1])
        for event in events:
            self._note(event)
            if event["event"] == "snapshot":
                self._screen.snapshot = event["path"], now - (last - _elapsed(event))
        self._screen.system = next((event["system"] for event in reversed(events) if event.get("system")), {})
        return screen(self._screen, console.width, console.height)


def _elapsed(event: Event) -> float:
    return float(event.get("elapsed_seconds") or event.get("seconds") or 0.0)


def draw(run: Path, step: int | None, columns: int) -> str:
    """Returns the live view at `step` (default: 80% of the run) as SVG."""
    events = read_events(RunPaths(run).metrics)
    steps = [event["step"] for event in events if event["event"] == "step"]
    step = step or steps[int(0.8 * (len(steps) - 1))]
    shown = [event for event in events if (event.get("step") or 0) <= step and event["event"] != "end"]
    with Path(os.devnull).open("w") as nowhere:
        rows = int(columns * ROWS_PER_COLUMN)
        console = Console(file=nowhere, width=columns, height=rows, record=True, force_terminal=True)
        console.print(RecordedView(console, Controls()).picture(shown, console))
        picture = console.export_svg(title="sansgpu train", theme=THEME, unique_id="live")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # pages show it with their own monospace font


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--step", type=int, help="last step to show; default: at 80%% of the run")
    parser.add_argument("--columns", type=int, default=120)
    args = parser.parse_args()
    os.environ["FORCE_COLOR"] = "1"  # plotille colors a curve only in a terminal otherwise
    args.svg.write_text(draw(args.run, args.step, args.columns), encoding="utf-8")


if __name__ == "__main__":
    main()
