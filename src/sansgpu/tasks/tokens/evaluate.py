"""Predicts and evaluates the tags of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.data.batch import IGNORE
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.sequences import PackedSequences
from sansgpu.tasks.evaluation import OrderingObjective, WindowEvaluator
from sansgpu.tasks.task import Sums
from sansgpu.tasks.tokens.data import TaggedWindows
from sansgpu.tasks.tokens.spans import SpanCounts, has_entities, scores, span_counts, spans_of

ROWS_AT_ONCE = 32


class TagModel(OrderingObjective, Protocol):
    """The interface of a model that tags words; see `TokensObjective`."""

    @property
    def labels(self) -> list[str]: ...

    def logits(self, batch: PackedSequences) -> torch.Tensor: ...


class TaggedWords(NamedTuple):
    """The P tagged words of a text: their indices, and the predicted labels with their probabilities."""

    words: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


class TagEvaluator(WindowEvaluator[TagModel, TaggedWindows]):
    """Tags words with a model, and computes metrics of tags and entities."""

    def __init__(self, objective: TagModel, tokenized: TaggedWindows) -> None:
        super().__init__(objective, tokenized)
        self._labels = objective.labels
        self._entities = has_entities(self._labels)

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the summed loss, the numbers of words and of correct words, and the counts of spans by label."""
        logits = self._word_logits(batch)
        targets = batch.targets[batch.targets != IGNORE]
        sums = {"loss": float(F.cross_entropy(logits, targets, reduction="sum")), "words": float(len(targets))}
        sums["right"] = float((logits.argmax(dim=1) == targets).sum())
        for text, tagged in self._tagged(batch, logits):
            gold = self._tokenized.targets[text][tagged.words]
            counts = span_counts(*(spans_of(self._tags(labels), self._entities) for labels in (gold, tagged.labels)))
            for label, found in counts.items():
                for name, count in zip(SpanCounts._fields, found, strict=True):
                    key = f"{name} {label}"
                    sums[key] = sums.get(key, 0.0) + count
        return sums

    def metrics(self, sums: Sums) -> dict[str, Any]:
        """Computes the loss per word, the accuracy, and micro-averaged scores of entities, between 0 and 1."""
        names = SpanCounts._fields
        labels = sorted({key.partition(" ")[2] for key in sums if key.startswith("gold ")})
        by_label = {label: [sums[f"{name} {label}"] for name in names] for label in labels}
        total = scores(*(sum(counts[part] for counts in by_label.values()) for part in range(len(names))))
        return {
            "loss": sums["loss"] / sums["words"],
            **{f"entity_{name}": value for name, value in total.items()},
            "accuracy": sums["right"] / sums["words"],
            "words": sums["words"],
            "by_label": {label: {**scores(*counts), "count": counts[-1]} for label, counts in by_label.items()},
        }

    def predictions(self, size: int, device: torch.device) -> list[dict[str, Any]]:
        """Returns the spans of each text. If its row has the words, spans also have token indices."""
        found: list[dict[str, Any]] = [{"spans": []} for _ in self._tokenized.texts]
        for batch in (batch.to(device) for batch in self.validation_batches(size)):
            for number, tagged in self._tagged(batch, self._word_logits(batch)):
                found[number] = {"spans": list(self._spans(self._tokenized.texts[number], tagged))}
        return found

    def predicted_rows(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """Yields each text with its spans and the predicted ones."""
        device = next(self.model.parameters()).device
        for number, found in enumerate(self.predictions(ROWS_AT_ONCE, device)):
            text, targets = self._tokenized.texts[number], self._tokenized.targets[number]
            given = TaggedWords(np.arange(len(targets)), targets, np.ones(len(targets)))
            label = list(self._spans(text, given))
            yield {"where": text.where, "text": text.text, "label": label, "predicted": found["spans"]}

    def _spans(self, text: TaggedText, tagged: TaggedWords) -> Iterator[dict[str, Any]]:
        for span in spans_of(self._tags(tagged.labels), self._entities):
            first, last = int(tagged.words[span.start]), int(tagged.words[span.stop - 1])
            start, end = int(text.starts[first]), int(text.ends[last])
            score = float(tagged.probabilities[span.start : span.stop].mean())
            place = {"start": start, "end": end, "label": span.label, "text": text.text[start:end], "score": score}
            yield {**place, **({"token_start": first, "token_end": last + 1} if text.given_words else {})}

    def _tags(self, labels: np.ndarray) -> list[str]:
        return [self._labels[number] for number in labels.tolist()]

    def _word_logits(self, batch: PackedSequences) -> torch.Tensor:
        """Returns the logits of all target words of a batch, in the order of the windows: (P, labels)."""
        return self._objective.logits(batch)[batch.targets != IGNORE].float()

    def _tagged(self, batch: PackedSequences, logits: torch.Tensor) -> Iterator[tuple[int, TaggedWords]]:
        """Yields the index of each text in a batch, and its words in order with their most probable labels."""
        assert batch.numbers is not None
        windows = [self._tokenized.windows[number] for number in batch.numbers.tolist()]
        probabilities, labels = (values.cpu().numpy() for values in logits.softmax(dim=1).max(dim=1))
        by_text: dict[int, list[TaggedWords]] = {}
        stop = 0
        for window in windows:
            start, stop = stop, stop + len(window.words)
            part = TaggedWords(window.words, labels[start:stop], probabilities[start:stop])
            by_text.setdefault(window.text, []).append(part)
        for text, parts in by_text.items():
            joined = TaggedWords(*map(np.concatenate, zip(*parts, strict=True)))
            order = np.argsort(joined.words)
            yield text, TaggedWords(*(values[order] for values in joined))
