"""Trains a model to classify texts or pairs of texts, or to predict a number for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F

from sansgpu.config import SETTINGS, Config, ConfigError
from sansgpu.config.paths import local_path
from sansgpu.data.headers import number_label_columns
from sansgpu.data.labeled import (
    LabeledText,
    LabelKind,
    Labels,
    find_labels,
    read_texts,
    tokenize_texts,
    unlabeled_text,
    with_targets,
)
from sansgpu.data.rows import BadRows, located
from sansgpu.data.sequences import LabeledSequences, PackedSequences
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_split
from sansgpu.models.model_folder import has_architecture
from sansgpu.models.pretrained import Head, HeadKind, ProblemType, load_tokenizer_of
from sansgpu.models.pretrained_source import pretrained_config
from sansgpu.tasks.evaluation import SplitEvaluator, require_rows
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask, longest_example, passes, require_examples, split_rows
from sansgpu.tasks.label_metrics import label_metrics
from sansgpu.tasks.task import Sums
from sansgpu.tasks.trained_model import EvaluationRequest, ModelSource, TrainedModel
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus

SCORE = "score"  # name of the only output of a regression
_PROBLEM_TYPES: dict[LabelKind, ProblemType] = {
    "single": "single_label_classification",
    "multiple": "multi_label_classification",
    "regression": "regression",
}
_KINDS = {problem: kind for kind, problem in _PROBLEM_TYPES.items()}


@dataclass(frozen=True)
class LabeledCorpus(TokenizedCorpus[LabeledSequences]):
    """Labeled texts for training and validation."""

    labels: Labels

    def preview(self) -> str | None:
        """Returns the text of the first row and its labels in brackets."""
        target = self.train.targets[0]
        if self.labels.kind == "single":
            shown = self.labels.names[int(target[0])]
        elif self.labels.kind == "multiple":
            shown = ", ".join(name for name, given in zip(self.labels.names, target, strict=True) if given)
        else:
            shown = f"{float(target[0]):g}"
        return f"{self.tokenizer.decode(self.train.tokens[0])} ⟦{shown}⟧"


class ClassifyObjective(FineTuning):
    """A model with a head for sequences, and its loss."""

    head_kind: ClassVar[HeadKind] = "sequence"
    class_weights: torch.Tensor | None = None  # (L,); only training has them

    @classmethod
    def head_of(cls, config: Config) -> Head:
        """Returns the head. Without data, which has not been read for an estimate, it has two labels."""
        if config.data.label_kind == "regression":
            return Head(cls.head_kind, (SCORE,), "regression")
        problem = _PROBLEM_TYPES["single" if config.data.label_kind == "auto" else config.data.label_kind]
        return Head(cls.head_kind, tuple(config.data.labels or ("0", "1")), problem)

    @property
    def label_kind(self) -> LabelKind:
        return _KINDS[cast(ProblemType, self.head.problem_type)]

    def summed_loss(self, batch: PackedSequences) -> torch.Tensor:
        smoothing = self.config.training.label_smoothing
        return self.losses(self.logits(batch), batch, smoothing, self.class_weights).sum()

    def logits(self, batch: PackedSequences) -> torch.Tensor:
        """Returns the logits of each example, (B, L) in fp32."""
        return self.unpadded.sequence_logits(batch.tokens, batch.lengths, batch.types)

    def losses(
        self, logits: torch.Tensor, batch: PackedSequences, smoothing: float = 0.0, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the loss of each example, (B,): cross-entropy, mean binary cross-entropy, or squared error."""
        known = batch.has_target()
        targets = batch.targets.masked_fill(~known[:, None], 0)
        if self.label_kind == "single":
            on_device = None if weights is None else weights.to(logits.device)
            losses = F.cross_entropy(logits, targets[:, 0], on_device, reduction="none", label_smoothing=smoothing)
        elif self.label_kind == "multiple":
            losses = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(dim=1)
        else:
            losses = (logits[:, 0] - targets[:, 0]).square()
        return losses * known


class Classify(ClassifyObjective, FineTuningTask):
    """`task: classify`."""

    settings = SETTINGS["classify"]
    verbs = ("evaluate", "predict", "export")
    row_forms = (("text",), ("text", "text_pair"))
    objective_class = ClassifyObjective
    evaluator: ClassifyEvaluator

    def __init__(self, config: Config, corpus: LabeledCorpus, effective_batch: int) -> None:
        super().__init__(config)
        self.use_corpus(corpus, effective_batch)
        self.evaluator = ClassifyEvaluator(self, corpus.validation, 0)
        if config.data.class_weights == "balanced":
            self.class_weights = balanced_weights(corpus.train.targets[:, 0], len(corpus.labels.names))

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, LabeledCorpus]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        data, numbered = number_label_columns(config.data)
        config = config.model_copy(update={"data": data})
        sources = open_sources(data, text_rows=True)
        tokenizer = load_tokenizer_of(config.model)
        notes: list[str] = []
        train_rows, held_rows = BadRows(data.on_bad_row), BadRows(data.on_bad_row)
        texts = read_texts(sources.train.rows(), data, train_rows)
        require_examples(sources, [len(texts)], "row", train_rows.notes())
        cls.require_readable(texts)
        labels = find_labels(texts, data, sources.train.name)
        notes += [f"{numbered}, {labels.shown}."] if numbered else []
        notes += [labels.note] if labels.note else []
        config = _with_labels(config, labels)
        split = None
        if sources.validation is not None:
            train, held = texts, read_texts(sources.validation.rows(), data, held_rows)
            cls.require_readable(held)
        else:
            train, held = split_rows(texts, [f"{t.text}\0{t.pair}".encode() for t in texts], data.validation_split)
            split = describe_split(len(train), len(held), "row", data.validation_split)

        def tokenized(part: list[LabeledText], rows: BadRows, name: str) -> LabeledSequences:
            size = sum(len(text.text) for text in part)
            progress("tokenizing", size, size)
            made = tokenize_labeled(part, labels, config, tokenizer, rows, lambda note: notes.append(f"{name} {note}"))
            rows.report(lambda note: notes.append(f"{name} rows: {note}"))
            return made

        parts = tokenized(train, train_rows, "training"), tokenized(held, held_rows, "validation")
        require_examples(sources, [len(part) for part in parts], "row", notes)
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(parts[0])}-{parts[0].lengths.sum()}"
        return config, LabeledCorpus(*parts, notes, fingerprint, tokenizer, labels, split=split)

    @classmethod
    def require_readable(cls, texts: Sequence[LabeledText]) -> None:
        """Raises BadRowError if the task cannot read one of the texts."""

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        """Builds `size` texts of random tokens with the first label."""
        outputs = len(cls.head_of(config).labels) if config.data.label_kind == "multiple" else 1
        dtype = np.float32 if config.data.label_kind == "regression" else np.int64
        return PackedSequences.of(cls.random_tokens(config, size, tokens), np.zeros((size, outputs), dtype))

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 32

    @classmethod
    def recognizes(cls, target: str) -> bool:
        """Returns whether a folder holds a transformers model that classifies sequences."""
        return has_architecture(local_path(target), "ForSequenceClassification")

    @classmethod
    def config_of_model(cls, source: ModelSource) -> Config:
        """Returns a configuration with the labels in the model's config.json."""
        config = super().config_of_model(source)
        settings: Any = pretrained_config(config.model.model_copy(update={"trust_remote_code": source.remote_code}))
        names = tuple(str(name) for _, name in sorted(settings.id2label.items()))
        kind = _KINDS.get(settings.problem_type) or ("regression" if len(names) == 1 else "single")
        return _with_labels(config, Labels(kind, () if kind == "regression" else names))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> ClassifyEvaluator:
        if request.data is None:
            part, skipped = cast(LabeledCorpus, request.own_corpus()).validation, 0
        else:
            data, numbered = number_label_columns(loaded.config.data.for_dataset(request.data))
            if numbered:
                request.warn(f"{numbered}.")
            source, bad_rows = open_single(request.data, data, text_rows=True), BadRows("skip")
            texts = read_texts(source.rows(), data, bad_rows)
            cls.require_readable(texts)
            labels = _labels_of(loaded.objective)
            part = tokenize_labeled(texts, labels, loaded.config, loaded.tokenizer, bad_rows, request.warn)
            bad_rows.report(lambda note: request.warn(f"{source.name}: {note}"))
            require_rows(part, source.name)
            skipped = bad_rows.count
        return ClassifyEvaluator(loaded.objective, part, skipped)

    @classmethod
    def predict(cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the label and the probability of each label for every row, or the number that is predicted for it."""
        data, objective = loaded.config.data, cast(ClassifyObjective, loaded.objective)
        texts = [unlabeled_text(row, data) for row in located(rows)]
        cls.require_readable(texts)
        made = tokenize_texts(texts, loaded.tokenizer, longest_example(loaded.config, loaded.tokenizer))
        part = LabeledSequences(made.ids, np.zeros((len(texts), 1), np.int64), made.types)
        labels, logits = _labels_of(objective), torch.empty(len(texts), len(objective.head.labels))
        for numbers in passes(part.lengths):
            logits[torch.from_numpy(numbers)] = objective.logits(part.batch(numbers).to(loaded.device)).cpu()
        return [prediction(row, labels) for row in logits]


def _with_labels(config: Config, labels: Labels) -> Config:
    """Returns a configuration that records the labels. Raises ConfigError if other settings do not fit them."""
    data = config.data.model_copy(update={"labels": list(labels.names), "label_kind": labels.kind})
    config = config.model_copy(update={"data": data})
    if found := next(iter(config.settings.problems(config)), None):
        raise ConfigError(f"{found}.")
    return config


def _labels_of(objective: ClassifyObjective) -> Labels:
    kind = objective.label_kind
    return Labels(kind, () if kind == "regression" else objective.head.labels)


def tokenize_labeled(
    texts: list[LabeledText], labels: Labels, config: Config, tokenizer: Any, bad_rows: BadRows, note: Any
) -> LabeledSequences:
    """Tokenizes texts, passing the number of truncated ones to `note`. Rows with unknown labels are bad rows."""
    kept, targets = with_targets(texts, labels, bad_rows)
    longest = longest_example(config, tokenizer)
    made = tokenize_texts(kept, tokenizer, longest)
    if made.truncated:
        note(f"texts: {made.truncated:,} of {len(kept):,} are longer than {longest} tokens and are truncated.")
    return LabeledSequences(made.ids, targets, made.types)


def balanced_weights(targets: np.ndarray, labels: int) -> torch.Tensor:
    """Returns the weight of each label, (L,), by which all labels have the same total weight and the mean is 1."""
    counts = np.bincount(targets, minlength=labels)
    return torch.from_numpy(len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))).float()


def prediction(logits: torch.Tensor, labels: Labels) -> dict[str, Any]:
    """Returns the prediction for one example from its logits, (L,)."""
    if labels.kind == "regression":
        return {"score": float(logits[0])}
    single = labels.kind == "single"
    scores = dict(zip(labels.names, (logits.softmax(0) if single else logits.sigmoid()).tolist(), strict=True))
    if single:
        return {"label": labels.names[int(logits.argmax())], "scores": scores}
    return {"labels": [name for name, score in scores.items() if score > 0.5], "scores": scores}


class ClassifyEvaluator(SplitEvaluator[ClassifyObjective, LabeledSequences]):
    """Predicts the labels of texts and computes metrics from all of them."""

    def __init__(self, objective: ClassifyObjective, part: LabeledSequences, skipped: int) -> None:
        super().__init__(objective, part)
        self._skipped = skipped

    def evaluate(self, batch: PackedSequences) -> Sums:
        """Returns the loss, without label smoothing and class weights, and each row's prediction under its number.

        Several labels are one entry each, `ROW LABEL`. Sums over ranks therefore hold the predictions of all rows.
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
        """Computes the loss per row and the metrics of the kind of labels."""
        numbers = sorted(int(name) for name in sums if name.isdigit())
        labels = _labels_of(self._objective)
        targets = torch.from_numpy(self._part.targets[numbers])
        if labels.kind == "multiple":
            values = [[sums.get(f"{n} {label}", 0.0) for label in range(len(labels.names))] for n in numbers]
        else:
            values = [[sums[f"{n}"]] for n in numbers]
        predicted = torch.tensor(values, dtype=torch.float64).to(targets.dtype)
        loss = sums["loss"] / sums["rows"]
        return {"loss": loss, **label_metrics(labels, predicted, targets), "rows": sums["rows"]}

    def detailed(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the number of bad rows, which have no prediction."""
        return {**metrics, "skipped": float(self._skipped)}
