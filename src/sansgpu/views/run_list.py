"""Prints the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sansgpu.views.results import RunSummary
from sansgpu.views.tables import count, storage
from sansgpu.views.terminal import clock, duration

_COLOURS = {"training": "green", "killed": "yellow", "interrupted": "yellow", "broken": "red"}


def _when(changed: str) -> str:
    return clock(datetime.fromisoformat(changed).astimezone().replace(tzinfo=None))


# Title, key, format, and priority: on narrow screens, columns with the highest number are dropped first.
_COLUMNS: list[tuple[str, str, Callable[[Any], str], int]] = [
    ("name", "name", str, 0),
    ("task", "task", str, 6),
    ("state", "state", str, 0),
    ("step", "step", "{:,}".format, 0),
    ("train", "loss", "{:.3f}".format, 3),
    ("val (best)", "best_loss", "{:.3f}".format, 0),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format, 4),
    ("params", "parameters", count, 5),
    ("time", "seconds", duration, 2),
    ("size", "size_bytes", storage, 7),
    ("changed", "changed", _when, 1),
]
_TEXT_COLUMNS = ("name", "task", "state")
MIN_NAME_WIDTH = 16  # characters


def print_runs(console: Console, rows: Sequence[RunSummary]) -> None:
    """Prints a table that fits the screen, then the problems of folders that cannot be read."""
    cells = {title: [_cell(row, key, format_value) for row in rows] for title, key, format_value, _ in _COLUMNS}
    widths = {title: max(map(len, (title, *column))) for title, column in cells.items()}
    widths["name"] = min(widths["name"], max(MIN_NAME_WIDTH, len("name")))
    shown = [title for title, *_ in _COLUMNS if title in _TEXT_COLUMNS or any(cells[title])]
    for title in sorted(shown, key=lambda title: -_priority(title)):
        if sum(widths[name] + 2 for name in shown) <= console.width or not _priority(title):
            break
        shown.remove(title)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in shown:
        right = title not in (*_TEXT_COLUMNS, "changed")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "name", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cells[t][number], style=_COLOURS.get(row.state, "")) if t == "state"
                        else Text(cells[t][number]) for t in shown))  # fmt: skip
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(Text(f"{row.path}: {row.problem}", style="red"), soft_wrap=True)


def _cell(row: RunSummary, key: str, format_value: Callable[[Any], str]) -> str:
    if (value := getattr(row, key)) is None:
        return ""
    return format_value(value) + (f"/{row.total_steps:,}" if key == "step" and row.total_steps else "")


def _priority(title: str) -> int:
    return next(order for name, _, _, order in _COLUMNS if name == title)
