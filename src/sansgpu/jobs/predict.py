"""Predictions for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from sansgpu.config import ConfigError, DataConfig
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import open_single
from sansgpu.train.loading import open_model

Row = dict[str, Any]


def predict(
    target: str,
    rows: Sequence[Row],
    snapshot: str,
    warn: Callable[[str], None],
    progress: ReportProgress,
    remote_code: bool = False,
    objective: str | None = None,
    **options: Any,
) -> list[Row]:
    """Returns the model's prediction for each row. `options` are those of the model's task.

    Raises ConfigError if the model's task predicts nothing.
    """
    loaded = open_model(target, "predict", snapshot, warn, remote_code, objective, progress)
    if unknown := next((name for name in options if name not in signature(loaded.kind.predict).parameters), None):
        flag = unknown.replace("_", "-")
        raise ConfigError(f"--{flag} has no effect for a model of task {loaded.config.task}; leave it out.")
    progress("predicting", 0, 0)
    bf16 = torch.autocast(loaded.device.type, torch.bfloat16, enabled=loaded.precision == "bf16")  # as in evaluations
    with torch.no_grad(), bf16:
        return list(loaded.kind.predict(loaded, rows, **options))


def rows_of(data: str) -> list[Row]:
    """Reads the rows of a dataset. Raises ConfigError if there are none, or one is not an object."""
    rows = list(open_single(data, DataConfig(dataset_name=data)).rows())
    if not rows:
        raise ConfigError(f"{data} has no rows.")
    if wrong := next((row for row in rows if not isinstance(row.value, dict)), None):
        raise ConfigError(f"{wrong.where} is not an object with columns.")
    return [row.value for row in rows]


def in_words(prediction: Row) -> str:
    """Returns a single prediction as text: an answer, a line per span, labels with their probabilities, or a score."""
    if "answer" in prediction:
        return str(prediction["answer"]) or "(no answer)"
    if "spans" in prediction:
        lines = (f"{s['start']}-{s['end']}  {s['label']}  {s['text']}  ({s['score']:.1%})" for s in prediction["spans"])
        return "\n".join(lines) or "(no spans)"
    if "scores" in prediction:
        chosen = prediction["labels"] if "labels" in prediction else [prediction["label"]]
        return ", ".join(f"{label} ({prediction['scores'][label]:.1%})" for label in chosen) or "(no label)"
    return f"{prediction['score']:.4f}"
