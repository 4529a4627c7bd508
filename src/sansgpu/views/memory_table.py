"""The result of `sansgpu plan --memory`, and its table."""

from __future__ import annotations

from typing import TypedDict

from rich.console import Console
from rich.table import Table

from sansgpu.views.tables import print_table, storage

_PRECISIONS = {"bf16": "bf16", "int8": "int8", "int4": "int4", "file": "as in the file", "auto": "as in the file"}


class MemoryOption(TypedDict):
    """A way to train a model at a context, with micro-batches of one example."""

    method: str  # whole | lora
    base_precision: str | None
    context: int
    needed_bytes: int
    gradient_checkpointing: bool
    fits: bool


class MemoryOptions(TypedDict):
    """What can be trained of a model in `memory_bytes`."""

    model: str
    memory_bytes: int
    options: list[MemoryOption]


def print_memory_options(console: Console, result: MemoryOptions) -> None:
    contexts = list(dict.fromkeys(option["context"] for option in result["options"]))
    title = f"{result['model']} in {storage(result['memory_bytes'])}, by tokens of context"
    table = Table(title=title, title_justify="left")
    table.add_column("trained")
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    rows: dict[str, list[str]] = {}
    for option in result["options"]:
        rows.setdefault(_name(option), []).append(_cell(option))
    for name, cells in rows.items():
        table.add_row(name, *cells)
    print_table(console, table)
    console.print("*: with model.gradient_checkpointing, which is about a third slower", style="dim")


def _name(option: MemoryOption) -> str:
    if option["base_precision"] is None:
        return "all weights, fp32 AdamW"
    return f"LoRA, base {_PRECISIONS[option['base_precision']]}"


def _cell(option: MemoryOption) -> str:
    needed = storage(option["needed_bytes"])
    if not option["fits"]:
        return f"too much ({needed})"
    return f"{needed}*" if option["gradient_checkpointing"] else needed
