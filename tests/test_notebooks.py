"""The documentation's notebook runs from its first cell to its last, and has no traces of the machine it ran on."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tools.notebook import INSTALL, NOTEBOOK, run_notebook

from tests.processes import json_lines, use_cache
from tests.real_model import real_model
from tests.tasks.folders import model_folder

# A word from each fact; the model does not use these words before training.
KNOWN = ("seven", "closed on Mondays", "Lantern Street", "plum", "terrace")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_cache(monkeypatch, tmp_path / "cache")
    return tmp_path


def committed() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.long
def test_every_cell_runs(folder: Path) -> None:
    run_notebook(NOTEBOOK, folder, {"MODEL": str(model_folder("llama")), "STEPS": 2})
    assert (folder / "harbor-cafe.gguf").read_bytes().startswith(b"GGUF")
    assert (folder / "runs/teach/final/config.json").is_file()


@pytest.mark.long
def test_a_real_model_learns_the_facts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = real_model(tmp_path_factory.mktemp("models"))
    run_notebook(NOTEBOOK, folder, {"MODEL": str(model)})
    before, after = (
        [word in row["completion"] for word, row in zip(KNOWN, json_lines(folder / f"{name}.jsonl"), strict=True)]
        for name in ("before", "after")
    )
    assert sum(before) == 0
    assert sum(after) >= 4


def test_each_step_is_explained_and_its_output_shown() -> None:
    cells = committed().cells
    counts = []
    for before, cell in pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
            counts.append(cell.execution_count)
    installed = [cell for cell in cells if INSTALL in cell.metadata.get("tags", [])]
    assert [cell.execution_count for cell in installed] == [None]
    assert [count for count in counts if count] == list(range(1, len(counts)))
    shown = {cell.id for cell in cells if cell.cell_type == "code" and cell.outputs}
    assert {"plan", "train", "curve", "after", "export"} <= shown


def test_links_lead_somewhere() -> None:
    targets = [target for cell in committed().cells for target in re.findall(r"\]\(([^)#]+)\)", cell.source)]
    assert len(targets) >= 4
    assert [target for target in targets if not (NOTEBOOK.parent / target).exists()] == []


def test_it_has_no_traces_of_a_machine() -> None:
    """`python -m tools.notebook` runs the notebook again and saves its outputs without such traces."""
    notebook = committed()
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|home|root|Users|usr|opt)/|\\u001b", text)
