"""Prints the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sansgpu.reporting.tables import count, gigabytes
from sansgpu.reporting.terminal import clock, duration

Row = dict[str, Any]
_COLOURS = {"training": "green", "killed": "yellow", "interrupted": "yellow", "broken": "red"}


def _steps(row: Row) -> str:
    return f"{row['step']:,}" + (f"/{row['total_steps']:,}" if row["total_steps"] else "")


def _when(row: Row) -> str:
    return clock(datetime.fromisoformat(row["changed"]).astimezone().replace(tzinfo=None))


# Title, key, format, and priority: on narrow screens, columns with the highest number are dropped first.
_COLUMNS: list[tuple[str, str, Callable[[Row], str], int]] = [
    ("name", "name", lambda row: row["name"], 0),
    ("task", "task", lambda row: row["task"], 6),
    ("state", "state", lambda row: row["state"], 0),
    ("step", "step", _steps, 0),
    ("train", "loss", lambda row: f"{row['loss']:.3f}", 3),
    ("val (best)", "best_loss", lambda row: f"{row['best_loss']:.3f}", 0),
    ("tokens/s", "tokens_per_second", lambda row: f"{row['tokens_per_second']:,.0f}", 4),
    ("params", "parameters", lambda row: count(row["parameters"]), 5),
    ("time", "seconds", lambda row: duration(row["seconds"]), 2),
    ("size", "size_bytes", lambda row: gigabytes(row["size_bytes"]), 7),
    ("changed", "changed", _when, 1),
]  # fmt: skip
_TEXT_COLUMNS = ("name", "task", "state")
MIN_NAME_WIDTH = 16  # characters


def print_runs(console: Console, rows: Sequence[Row]) -> None:
    """Prints a table that fits the screen, then the problems of folders that cannot be read."""
    cells = {title: [_cell(row, key, format_cell) for row in rows] for title, key, format_cell, _ in _COLUMNS}
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
        table.add_row(*(Text(cells[t][number], style=_COLOURS.get(row["state"], "")) if t == "state"
                        else Text(cells[t][number]) for t in shown))  # fmt: skip
    console.print(table)
    for row in rows:
        if row["problem"]:
            console.print(Text(f"{row['path']}: {row['problem']}", style="red"), soft_wrap=True)


def _cell(row: Row, key: str, format_cell: Callable[[Row], str]) -> str:
    return "" if row[key] is None else format_cell(row)


def _priority(title: str) -> int:
    return next(order for name, _, _, order in _COLUMNS if name == title)
