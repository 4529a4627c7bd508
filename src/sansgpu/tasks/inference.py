"""Loads trained models for use, and predicts rows with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from sansgpu.machine.probe import has_bf16_tensors, mixed_precision
from sansgpu.models.modules import narrow_matrices, set_matmul_precision
from sansgpu.tasks.task import ModelSource, TaskClass, TrainedModel

CHUNK_ROWS = 4096  # rows in memory at a time


def load_for_use(
    task: TaskClass, source: ModelSource, device: torch.device, precision: str, is_precision_chosen: bool = False
) -> TrainedModel:
    """Loads a model in evaluation mode, which multiplies in `precision` on `device`. Raises ConfigError."""
    objective, tokenizer, config = task.load(source)
    objective.model.eval().to(device)
    set_matmul_precision(objective.model, precision)
    if precision == "int8" and has_bf16_tensors(precision):
        # Our kernels multiply bf16 only with bf16. Under autocast alone, torch would multiply, and not in int8.
        narrow_matrices(objective.model, torch.nn.Linear)
    return TrainedModel(task, source, objective, tokenizer, config, device, precision, is_precision_chosen)


def predictions(loaded: TrainedModel, rows: Iterator[dict[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields a prediction for each row, in chunks of rows. `options` are those of the model's task."""
    precision_of_evaluations = mixed_precision(loaded.device, loaded.precision)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        with torch.no_grad(), precision_of_evaluations:
            predicted = list(loaded.task_class.predict(loaded, chunk, **options))
        yield from predicted
