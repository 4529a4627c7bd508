"""Rows read as task tokens reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sansgpu.config import DataConfig
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import open_sources
from sansgpu.tasks.tokens.spans import spans_of
from sansgpu.tasks.tokens.tagged import in_iob2, read_tagged

TEXT = "Maria lives in Porto."
Learned = tuple[list[list[str]], list[str]]  # the spans of each text as "text label", and the messages


def learned(rows: list[Any] | Path, **settings: Any) -> Learned:
    """Reads rows or a file as task tokens does."""
    report, notes = RowReport("fail"), list[str]()
    data = TaggedDataConfig.model_validate({"dataset_name": str(rows), **settings})
    if isinstance(rows, Path):
        data, said = resolve_columns(data, TAGGED)
        notes += [said] if said else []
        opened = open_sources(DataConfig(dataset_name=str(rows), tag_column=data.tag_column)).train.rows()
    else:
        opened = iter([SourceRow(f"rows.jsonl, line {number}", row) for number, row in enumerate(rows, 1)])
    texts = in_iob2(read_tagged(opened, report, data, "rows", notes), "rows", notes)
    spans = [
        [f"{text.text[text.starts[s.start] : text.ends[s.stop - 1]]} {s.label}" for s in spans_of(text.tags)]
        for text in texts
    ]
    return spans, [*notes, *report.notes()]


def one(row: Any, **settings: Any) -> tuple[list[str], list[str]]:
    spans, notes = learned([row], **settings)
    assert len(spans) == 1
    return spans[0], notes


LISTS = [[0, 5, "PER"], [15, 20, "LOC"]]
TOKENS = [{"id": 0, "text": "Maria", "start": 0, "end": 5}]


def studio(*annotations: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"data": {"text": TEXT}, "annotations": list(annotations), **more}


def result(start: int, end: int, label: str, **more: Any) -> dict[str, Any]:
    return {"type": "labels", "value": {"start": start, "end": end, "text": TEXT[start:end], "labels": [label], **more}}


DONE = {"result": [result(0, 5, "PER"), result(15, 20, "LOC")]}
