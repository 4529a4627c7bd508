"""Tables with labels, prepared for training."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from sansgpu.tasks.classify.data import LabeledCorpus
from sansgpu.tasks.classify.settings import WeightedDataConfig
from sansgpu.tasks.classify.task import Classify
from sansgpu.tasks.configuration import load_config
from tests.processes import overrides
from tests.tasks.fine_tuned import TINY
from tests.tasks.folders import model_folder

SETTINGS = WeightedDataConfig()
BERT = {"task": "classify", "model.name_or_path": model_folder("bert")}


def prepared(path: Path, **changes: object) -> tuple[Any, LabeledCorpus]:
    """Reads a file for training, and returns its settings of the data."""
    chosen = {"data.dataset_name": path, "data.validation_name": path}
    config, _ = load_config(None, overrides(TINY, BERT, chosen, changes))
    config, corpus = Classify.prepare(config, path.parent, lambda *_: None)
    return config.data, corpus


def table(path: Path, rows: list[list[object]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def labeled(tmp_path: Path, labels: list[object]) -> Path:
    """Writes a table with these labels, one a row."""
    return table(tmp_path / "rows.csv", [["text", "label"], *([f"text {n}", v] for n, v in enumerate(labels))])


def said(corpus: LabeledCorpus) -> str:
    return "\n".join(corpus.notes)
