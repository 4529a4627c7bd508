"""Computes metrics of predicted labels and scores with torchmetrics.

torchmetrics takes seconds to import, and every command loads this module, so functions import it when they need it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from sansgpu.data.sequences import LabeledSequences, PackedSequences
from sansgpu.tasks.classify.data import labels_of
from sansgpu.tasks.classify.labels import Labels
from sansgpu.tasks.classify.objective import ClassifyObjective
from sansgpu.tasks.evaluation import SplitEvaluator, wilson
from sansgpu.tasks.task import Sums

FEW_ROWS = 100  # with fewer rows, accuracy is shown with its confidence interval, which can exceed a width of 0.2
MAX_CONFUSION_LABELS = 30  # a larger confusion matrix cannot be read in a report


def label_metrics(labels: Labels, predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Returns the metrics of R rows.

    Predictions and targets are (R, 1) label ids or scores, or (R, L) zeros and ones for multi-label classification.
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
    """Returns Matthews' correlation. It is 0 if all predictions or labels are equal, as in scikit-learn."""
    from torchmetrics.functional import classification

    if any(len(values.unique()) < 2 for values in (given, right)):
        return 0.0
    return float(classification.multiclass_matthews_corrcoef(given, right, count))


def _several(predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    from torchmetrics.functional import classification

    count = targets.shape[1]
    if count == 1:  # torchmetrics does not support a single label
        predicted, targets, count = predicted.repeat(1, 2), targets.repeat(1, 2), 2
    return {
        "accuracy": float(classification.multilabel_exact_match(predicted, targets, count)),
        "macro_f1": float(classification.multilabel_f1_score(predicted, targets, count, average="macro")),
        "micro_f1": float(classification.multilabel_f1_score(predicted, targets, count, average="micro")),
    }


def _correlations(predicted: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Returns Spearman's and Pearson's correlation, which are NaN if all predictions or all targets are equal."""
    from torchmetrics.functional import regression

    constant = any(bool((values == values[0]).all()) for values in (predicted, targets))
    if constant or not bool(predicted.isfinite().all()):
        return {"spearman": math.nan, "pearson": math.nan}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns about nearly constant values
        spearman = regression.spearman.spearman_corrcoef(predicted, targets)
        pearson = regression.pearson.pearson_corrcoef(predicted, targets)
    return {"spearman": float(spearman), "pearson": float(pearson)}


def prediction(logits: torch.Tensor, labels: Labels) -> dict[str, Any]:
    """Converts the logits of an example, (L,), to a prediction."""
    if labels.kind == "regression":
        return {"score": float(logits[0])}
    single = labels.kind == "single"
    scores = dict(zip(labels.names, (logits.softmax(0) if single else logits.sigmoid()).tolist(), strict=True))
    if single:
        return {"label": labels.names[int(logits.argmax())], "scores": scores}
    return {"labels": [name for name, score in scores.items() if score > 0.5], "scores": scores}


class ClassifyEvaluator(SplitEvaluator[ClassifyObjective, LabeledSequences]):
    """Predicts the labels of all texts, and computes metrics from the predictions."""

    def __init__(self, objective: ClassifyObjective, part: LabeledSequences, skipped: int) -> None:
        super().__init__(objective, part)
        self._skipped, self._predicted = skipped, dict[int, torch.Tensor]()  # by row, in the last evaluation

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the plain loss (without label smoothing and class weights), and each row's prediction.

        The keys of predictions are row numbers, or `ROW LABEL` for each label of a multi-label prediction. So summing
        over batches and ranks collects the predictions of all rows.
        """
        assert batch.numbers is not None
        logits = self._objective.logits(batch)
        sums = {"loss": float(self._objective.losses(logits, batch).sum()), "rows": float(len(batch))}
        kind = self._objective.label_kind
        for number, row in zip(batch.numbers.tolist(), logits.cpu(), strict=True):
            if kind == "multiple":
                sums[f"{number}"] = 0.0
                sums |= {f"{number} {label}": 1.0 for label in torch.nonzero(row > 0).flatten().tolist()}
            else:
                sums[f"{number}"] = float(row.argmax() if kind == "single" else row[0])
        return sums

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Computes the loss per row, and the metrics for the kind of labels."""
        numbers = sorted(int(name) for name in sums if name.isdigit())
        labels = labels_of(self._objective)
        targets = torch.from_numpy(self._part.targets[numbers])
        if labels.kind == "multiple":
            values = [[sums.get(f"{n} {label}", 0.0) for label in range(len(labels.names))] for n in numbers]
        else:
            values = [[sums[f"{n}"]] for n in numbers]
        predicted = torch.tensor(values, dtype=torch.float64).to(targets.dtype)
        self._predicted = dict(zip(numbers, predicted, strict=True))
        loss = sums["loss"] / sums["rows"]
        return {"loss": loss, **label_metrics(labels, predicted, targets), "rows": sums["rows"]}

    def predicted_rows(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields where each row is in its file, its text, its label and the predicted one."""
        labels = labels_of(self._objective)
        for number, predicted in self._predicted.items():
            row, target = self._part.rows[number], torch.from_numpy(self._part.targets[number])
            text = {"text": row.text, **({} if row.pair is None else {"text_pair": row.pair})}
            yield {"where": row.where, **text, "label": _named(target, labels), "predicted": _named(predicted, labels)}

    def detailed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the number of bad rows, which were skipped."""
        return {**metrics, "skipped": float(self._skipped)}


def _named(values: torch.Tensor, labels: Labels) -> Any:
    """Returns the name of a label, the names of several, or a score. `values` are as in the targets of a row, (O,)."""
    if labels.kind == "regression":
        return float(values[0])
    if labels.kind == "single":
        return labels.names[int(values[0])]
    return [name for name, value in zip(labels.names, values.tolist(), strict=True) if value]
