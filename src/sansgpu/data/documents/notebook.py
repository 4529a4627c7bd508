"""Reads Jupyter notebooks (.ipynb): the text and code of their cells, without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sansgpu.data.documents.content import read_content
from sansgpu.data.documents.document import Document, UnreadableError, numbered
from sansgpu.data.documents.text import cleaned

MAX_BYTES = 256 << 20


def read_ipynb(path: Path) -> Document:
    """Reads the cells of a notebook; code is fenced as in Markdown. Raises UnreadableError."""
    content = read_content(path, MAX_BYTES, "clear its outputs")
    try:
        notebook = json.loads(content)
    except ValueError:
        notebook = None
    if not isinstance(notebook, dict):
        raise UnreadableError("is not a notebook, or damaged; save it again with Jupyter")
    language = _language(notebook)
    cells = [cell for cell in _cells(notebook) if isinstance(cell, dict)]
    outputs = sum(len(found) for cell in cells if isinstance(found := cell.get("outputs"), list))
    left_out = {"notebook output": outputs} if outputs else {}
    return Document("cell", numbered([_text(cell, language) for cell in cells]), left_out=left_out)


def _cells(notebook: dict[str, Any]) -> list[Any]:
    cells = notebook.get("cells")
    if isinstance(cells, list):
        return cells
    sheets = notebook.get("worksheets")  # before version 4
    if not isinstance(sheets, list):
        raise UnreadableError("has no cells; save it again with Jupyter")
    return [cell for sheet in sheets if isinstance(sheet, dict) for cell in sheet.get("cells") or ()]


def _language(notebook: dict[str, Any]) -> str:
    metadata = notebook.get("metadata")
    for key, name in (("language_info", "name"), ("kernelspec", "language")):
        inner = metadata.get(key) if isinstance(metadata, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get(name), str):
            return str(inner[name])
    return "python"


def _text(cell: dict[str, Any], language: str) -> str:
    source = cell.get("source", cell.get("input", ""))
    lines = source if isinstance(source, list) else [source]
    text = cleaned("".join(line for line in lines if isinstance(line, str)))
    is_code = cell.get("cell_type") == "code" and text.strip()
    return f"```{language}\n{text}\n```" if is_code else text
