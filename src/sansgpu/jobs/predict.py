"""Predictions for rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.train.evaluate import evaluate
from sansgpu.train.loading import open_model
from sansgpu.train.step import StepPlan

Row = dict[str, Any]


def predict(
    target: str,
    rows: Sequence[Row],
    snapshot: str,
    warn: Callable[[str], None],
    remote_code: bool = False,
    **options: Any,
) -> list[Row]:
    """Returns the model's prediction for each row. `options` are those of the model's task.

    Raises ConfigError if a text is empty, or the model's task predicts nothing.
    """
    for row in rows:
        if any(not str(text).strip() for text in row.values()):
            raise ConfigError(f"--{' and --'.join(row)} must not be empty.")
    loaded = open_model(target, "predict", snapshot, warn, remote_code)
    predictor = loaded.kind.predictor(loaded, rows, **options)
    evaluate(predictor, StepPlan(loaded.kind.evaluation_batch(loaded.config), loaded.device, "fp32"))
    return predictor.predictions()
