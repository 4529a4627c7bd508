"""Fixtures for tests of data."""

import json
from pathlib import Path

import pytest

from tests.tasks.graph.graph_files import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_rows(*rows: object, name: str = "a.jsonl") -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return tmp_path / name

    return write_rows
