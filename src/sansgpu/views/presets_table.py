"""The result of `sansgpu plan --presets`, and its tables."""

from __future__ import annotations

from typing import TypedDict

from rich.console import Console
from rich.table import Table

from sansgpu.views.tables import count, print_table, storage

HOUR, DAY = 3600.0, 86400.0


class ProcessorSpeed(TypedDict):
    """The estimated speed of a preset on a kind of processor."""

    processor: str
    cores: int
    precision: str
    gemm_flops_per_second: float
    tokens_per_second: float
    optimal_seconds: float  # time to train on `optimal_tokens`


class PresetRow(TypedDict):
    """A preset's memory, in the precision that needs more, and its speeds."""

    preset: str
    parameters: int
    batch_size: int
    gradient_accumulation_steps: int
    window: int
    tokens_per_step: int
    memory_bytes: dict[str, int]
    least_memory_bytes: int
    recommended_memory_bytes: int
    available_bytes: int
    fits: bool
    optimal_tokens: int
    speeds: list[ProcessorSpeed]


def print_presets(console: Console, rows: list[PresetRow]) -> None:
    memory = Table(title="memory", title_justify="left")
    for heading in ("preset", "parameters", "at least", "recommended", "here"):
        memory.add_column(heading, justify="left" if heading in ("preset", "here") else "right")
    for row in rows:
        memory.add_row(*memory_cells(row), "fits" if row["fits"] else "too much")
    print_table(console, memory)
    console.print("at least: with micro-batch 1 and gradient checkpointing", style="dim")
    title = f"tokens/s, and time for {', '.join(count(row['optimal_tokens']) for row in rows)} tokens (estimates)"
    speeds = Table(title=title, title_justify="left")
    speeds.add_column("processor")
    for row in rows:
        speeds.add_column(row["preset"], justify="right")
    for cells in zip(*map(speed_cells, rows), strict=True):
        speeds.add_row(cells[0][0], *(cell for _, cell in cells))
    print_table(console, speeds)
    console.print("these are 20 tokens per parameter, which is compute-optimal", style="dim")


def memory_cells(row: PresetRow) -> tuple[str, ...]:
    """Returns name, parameters, and minimum and recommended memory."""
    sizes = (row["least_memory_bytes"], row["recommended_memory_bytes"])
    return row["preset"], count(row["parameters"]), *map(storage, sizes)


def speed_cells(row: PresetRow) -> list[tuple[str, str]]:
    """Returns (processor, speed and time) of each processor."""
    return [
        (speed["processor"], f"{speed['tokens_per_second']:,.0f}/s, {_time(speed['optimal_seconds'])}")
        for speed in row["speeds"]
    ]


def _time(seconds: float) -> str:
    """Formats a long duration with two digits, e.g. 3.5 h or 12 d."""
    number, unit = (seconds / HOUR, "h") if seconds < 2 * DAY else (seconds / DAY, "d")
    return f"{number:.1f} {unit}" if number < 10 else f"{number:,.0f} {unit}"
