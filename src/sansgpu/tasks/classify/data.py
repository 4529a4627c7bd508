"""Reads, splits and tokenizes labeled texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.row_report import RowReport
from sansgpu.data.sequences import LabeledSequences
from sansgpu.tasks.classify.checks import label_notes
from sansgpu.tasks.classify.labels import Labels, tokenize_texts, with_targets
from sansgpu.tasks.classify.objective import ClassifyObjective
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.fine_tuning import longest_example


@dataclass(frozen=True)
class LabeledCorpus(TokenizedCorpus[LabeledSequences]):
    """Labeled texts for training and validation."""

    labels: Labels

    def preview(self) -> str | None:
        """Returns the text of the first row, with its labels in brackets."""
        target = self.train.targets[0]
        if self.labels.kind == "single":
            shown = self.labels.names[int(target[0])]
        elif self.labels.kind == "multiple":
            shown = ", ".join(name for name, given in zip(self.labels.names, target, strict=True) if given)
        else:
            shown = f"{float(target[0]):g}"
        return f"{self.tokenizer.decode(self.train.tokens[0])} ⟦{shown}⟧"


def with_labels(config: Config, labels: Labels) -> Config:
    """Returns a configuration with the labels. Raises ConfigError if other settings do not fit them."""
    config = config.with_values("data", labels=list(labels.names), label_kind=labels.kind)
    if found := next(iter(config.settings.problems(config)), None):
        raise ConfigError(f"{found}.")
    return config


def labels_of(objective: ClassifyObjective) -> Labels:
    kind = objective.label_kind
    return Labels(kind, () if kind == "regression" else objective.head.labels)


def tokenize_labeled(
    texts: list[LabeledText],
    labels: Labels,
    config: Config,
    tokenizer: Any,
    bad_rows: RowReport,
    note: Callable[[str], None],
    trains: bool = False,
) -> LabeledSequences:
    """Tokenizes texts, and reports the number of truncated ones to `note`. Rows with unknown labels are bad rows.

    If the model `trains` on the texts, also reports what may be wrong with their labels.
    """
    kept, targets = with_targets(texts, labels, bad_rows)
    for message in label_notes(kept, targets, labels) if trains and kept else ():
        note(message)
    longest = longest_example(config, tokenizer)
    made = tokenize_texts(kept, tokenizer, longest)
    if made.truncated:
        note(f"{made.truncated:,} of {len(kept):,} texts are truncated, because they are longer than {longest} tokens.")
    return LabeledSequences(made.ids, targets, made.types, () if trains else kept)


def balanced_weights(targets: np.ndarray, labels: Labels) -> torch.Tensor:
    """Returns class weights, (L,), for the targets of the training rows.

    For a single label per row, all labels get the same total weight, with a mean of 1 over examples. For several, it is
    the pos_weight of each label: negative / positive examples, or 1 if all examples are equal.
    """
    if labels.kind == "multiple":
        positive = targets.sum(axis=0)
        ratio = (len(targets) - positive) / np.maximum(positive, 1)
        return torch.from_numpy(np.where((positive > 0) & (positive < len(targets)), ratio, 1)).float()
    counts = np.bincount(targets[:, 0], minlength=len(labels.names))
    return torch.from_numpy(len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))).float()
