"""Tables fit the screen without truncating headers or cells."""

import io

import pytest
from rich import box
from rich.table import Table

from sansgpu.views.tables import grid, print_table
from sansgpu.views.terminal import RunConsole

HEADS = ("relation", "parameters", "expected loss", "baseline MRR", "tokens/s")
ROWS = [("derivationally_related_form", "139.7k", "+1.2%", "0.0500", "24,196"), ("part", "7.2M", "best", "0.1", "1")]


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("width", [120, 90, 80, 60, 50])
def test_no_head_and_no_cell_is_cut(width: int, lines: bool) -> None:
    table = Table(title="chosen from", box=box.HEAVY_HEAD if lines else None, pad_edge=lines)
    for head in HEADS:
        table.add_column(head, justify="right")
    for row in ROWS:
        table.add_row(*row)
    file = io.StringIO()
    print_table(RunConsole(file=file, width=width), table)
    shown = file.getvalue()
    words = [word for text in ("chosen from", *HEADS, *(cell for row in ROWS for cell in row)) for word in text.split()]
    assert all(word in shown for word in words)
    assert max(map(len, shown.splitlines())) <= width


def test_a_long_path_continues_on_the_next_line() -> None:
    path, table, file = "/somewhere/" + "folder/" * 20, grid(), io.StringIO()
    table.add_row("cache", path)
    RunConsole(file=file, width=60).print(table)
    assert "".join(line.removeprefix("cache").strip() for line in file.getvalue().splitlines()) == path
