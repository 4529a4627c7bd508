"""Metrics of predicted labels and scores, by torchmetrics.

Functions import torchmetrics when they need it, because that takes seconds and every command loads this module.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from sansgpu.data.labeled import Labels
from sansgpu.tasks.intervals import wilson

FEW_ROWS = 100  # below, an accuracy is shown with its interval, which spans a fifth of all values
MAX_CONFUSION_LABELS = 30  # more cannot be read in a report


def label_metrics(labels: Labels, predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Returns the metrics of R rows; (R, 1) indices of labels or scores, or (R, L) zeros and ones for several labels.

    `confusion[i][j]` is the number of rows with label i for which label j was predicted.
    """
    if labels.kind == "regression":
        return _correlations(predicted[:, 0].double(), targets[:, 0].double())
    if labels.kind == "multiple":
        return _several(predicted, targets)
    from torchmetrics.functional import classification

    count = len(labels.names)
    given, right = predicted[:, 0], targets[:, 0]
    found: dict[str, Any] = {
        "accuracy": float(classification.multiclass_accuracy(given, right, count, average="micro")),
        "macro_f1": float(classification.multiclass_f1_score(given, right, count, average="macro")),
        "matthews": _matthews(given, right, count),
    }
    if len(right) < FEW_ROWS:
        found["accuracy_interval"] = wilson(found["accuracy"], len(right))
    if count <= MAX_CONFUSION_LABELS:
        found["confusion"] = classification.multiclass_confusion_matrix(given, right, count).tolist()
    return found


def _matthews(given: torch.Tensor, right: torch.Tensor, count: int) -> float:
    """Returns 0 if all predictions or all labels are equal, as in scikit-learn; torchmetrics approximates a limit."""
    from torchmetrics.functional import classification

    if any(len(values.unique()) < 2 for values in (given, right)):
        return 0.0
    return float(classification.multiclass_matthews_corrcoef(given, right, count))


def _several(predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    from torchmetrics.functional import classification

    count = targets.shape[1]
    if count == 1:  # torchmetrics refuses a single label
        predicted, targets, count = predicted.repeat(1, 2), targets.repeat(1, 2), 2
    return {
        "accuracy": float(classification.multilabel_exact_match(predicted, targets, count)),
        "macro_f1": float(classification.multilabel_f1_score(predicted, targets, count, average="macro")),
        "micro_f1": float(classification.multilabel_f1_score(predicted, targets, count, average="micro")),
    }


def _correlations(predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Returns the rank and the linear correlation; NaN if all predictions or all targets are equal."""
    from torchmetrics.functional import regression

    constant = any(bool((values == values[0]).all()) for values in (predicted, targets))
    if constant or not bool(predicted.isfinite().all()):
        return {"spearman": math.nan, "pearson": math.nan}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns of nearly constant values
        spearman = regression.spearman.spearman_corrcoef(predicted, targets)
        pearson = regression.pearson.pearson_corrcoef(predicted, targets)
    return {"spearman": float(spearman), "pearson": float(pearson)}
