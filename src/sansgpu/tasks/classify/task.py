"""`task: classify` trains a model to predict labels or scores of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.label_columns import find_label_columns
from sansgpu.data.forms.labels import LABELED, LabeledText, unlabeled_text
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import located
from sansgpu.data.sequences import LabeledSequences, PackedSequences
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_leak, describe_split
from sansgpu.data.tables import Columns
from sansgpu.events.progress import ReportProgress
from sansgpu.models.formats.folders import has_architecture
from sansgpu.models.huggingface.sentence_embedding import MODULES, scores_by_logits
from sansgpu.models.huggingface.source import model_file, pretrained_config
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.capabilities import Predicts
from sansgpu.tasks.classify.data import LabeledCorpus, balanced_weights, labels_of, tokenize_labeled, with_labels
from sansgpu.tasks.classify.evaluate import ClassifyEvaluator, prediction
from sansgpu.tasks.classify.known_labels import with_labels_of_model
from sansgpu.tasks.classify.labels import Labels, find_labels, tokenize_texts
from sansgpu.tasks.classify.objective import LABEL_KINDS, ClassifyObjective
from sansgpu.tasks.classify.settings import SETTINGS, LabelDataConfig, WeightedDataConfig
from sansgpu.tasks.evaluation import require_rows
from sansgpu.tasks.fine_tuning import FineTuningTask, longest_example, passes, require_examples, split_rows
from sansgpu.tasks.task import EvaluationRequest, ModelSource, TrainedModel


class Classify(Predicts, FineTuningTask):
    """`task: classify`."""

    settings = SETTINGS
    flag_columns = (("text",), ("text", "text_pair"))
    objective_class = ClassifyObjective
    evaluator: ClassifyEvaluator

    def __init__(self, config: Config, corpus: LabeledCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        self.evaluator = ClassifyEvaluator(self.objective, corpus.validation, 0)
        if WeightedDataConfig.of(config).class_weights == "balanced":
            self.objective.class_weights = balanced_weights(corpus.train.targets, corpus.labels)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, LabeledCorpus]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        data, numbered = resolve_columns(WeightedDataConfig.of(config), LABELED)
        sources = open_sources(data, LABELED.text_rows, progress)
        columns, found = find_label_columns(sources.train.rows, Columns.of(data), sources.train.name)
        data = columns.set_in(data)
        config = config.model_copy(update={"data": data})
        tokenizer = load_tokenizer_of(config.model)
        notes = [*sources.notes, *([f"{found}."] if found else [])]
        train_rows, held_rows = RowReport.of(data), RowReport.of(data)
        texts = LABELED.read_all(sources.train.rows(), train_rows, columns)
        require_examples(sources, [len(texts)], "row", train_rows.notes())
        cls.require_readable(texts)
        labels = with_labels_of_model(find_labels(texts, data, sources.train.name, columns.labels), config)
        notes += [f"{numbered}, {labels.shown}."] if numbered else []
        notes += labels.notes
        if scores_by_logits(model_file(config.model, MODULES)):
            notes.append(
                f"{config.model.name_or_path} scores pairs of texts by the logits of two tokens; these scores and its "
                "prompts are not used, and a new head is trained."
            )
        config = with_labels(config, labels)
        split = None
        if sources.validation is not None:
            train, held = texts, LABELED.read_all(sources.validation.rows(), held_rows, columns)
            cls.require_readable(held)
        else:
            train, held = split_rows(texts, [f"{t.text}\0{t.pair}".encode() for t in texts], data.validation_split)
            split = describe_split(len(train), len(held), "row", data.validation_split)

        def tokenized(part: list[LabeledText], rows: RowReport, name: str) -> LabeledSequences:
            size = sum(len(text.text) for text in part)
            progress("tokenizing", size, size)

            def said(note: str) -> None:
                notes.append(f"{name} data: {note}")

            made = tokenize_labeled(part, labels, config, tokenizer, rows, said, part is train)
            rows.report(lambda note: notes.append(f"{name} rows: {note}"))
            return made

        parts = tokenized(train, train_rows, "training"), tokenized(held, held_rows, "validation")
        require_examples(sources, [len(part) for part in parts], "row", notes)
        if leak := describe_leak(((t.text, t.pair) for t in train), [(t.text, t.pair) for t in held], "text"):
            notes.append(f"{leak}.")
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(parts[0])}-{parts[0].lengths.sum()}"
        return config, LabeledCorpus(*parts, notes, fingerprint, tokenizer, labels, split=split)

    @classmethod
    def require_readable(cls, texts: Sequence[LabeledText]) -> None:
        """Raises BadRowError if the task does not support one of the texts."""

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        """Builds `size` texts of random tokens that all have the first label."""
        outputs = (
            len(cls.objective_class.head_of(config).labels)
            if LabelDataConfig.of(config).label_kind == "multiple"
            else 1
        )
        dtype = np.float32 if LabelDataConfig.of(config).label_kind == "regression" else np.int64
        return PackedSequences.of(
            cls.objective_class.random_tokens(config, size, tokens), np.zeros((size, outputs), dtype)
        )

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 32

    @classmethod
    def recognizes(cls, target: str) -> bool:
        """Returns whether a folder holds a transformers model for sequence classification."""
        return has_architecture(local_path(target), "ForSequenceClassification")

    @classmethod
    def config_of_model(cls, source: ModelSource) -> Config:
        """Returns a configuration with the labels from the model's config.json."""
        config = super().config_of_model(source)
        settings: Any = pretrained_config(config.model.model_copy(update={"trust_remote_code": source.remote_code}))
        names = tuple(str(name) for _, name in sorted(settings.id2label.items()))
        kind = LABEL_KINDS.get(settings.problem_type) or ("regression" if len(names) == 1 else "single")
        return with_labels(config, Labels(kind, () if kind == "regression" else names))

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> ClassifyEvaluator:
        if request.data is None:
            part, skipped = cast(LabeledCorpus, request.own_corpus()).validation, 0
        else:
            data, numbered = resolve_columns(LabelDataConfig.of(loaded.config).for_dataset(request.data), LABELED)
            if numbered:
                request.warn(f"{numbered}.")
            source, bad_rows = open_single(request.data, data, LABELED.text_rows), RowReport("skip")
            columns, found = find_label_columns(source.rows, Columns.of(data), source.name)
            if found:
                request.warn(f"{found}.")
            texts = LABELED.read_all(source.rows(), bad_rows, columns)
            cls.require_readable(texts)
            labels = labels_of(loaded.objective)
            part = tokenize_labeled(texts, labels, loaded.config, loaded.tokenizer, bad_rows, request.warn)
            for note in (*source.notes, *bad_rows.notes()):
                request.warn(f"{source.name}: {note}")
            require_rows(part, source.name)
            skipped = bad_rows.skipped
        return ClassifyEvaluator(loaded.objective, part, skipped)

    @classmethod
    def predict(cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns, for each row, the predicted label and the probability of every label, or the predicted score."""
        columns, objective = Columns.of(loaded.config.data), cast(ClassifyObjective, loaded.objective)
        texts = [unlabeled_text(row, columns) for row in located(rows)]
        cls.require_readable(texts)
        made = tokenize_texts(texts, loaded.tokenizer, longest_example(loaded.config, loaded.tokenizer))
        part = LabeledSequences(made.ids, np.zeros((len(texts), 1), np.int64), made.types)
        labels, logits = labels_of(objective), torch.empty(len(texts), len(objective.head.labels))
        order = objective.ordered(np.argsort(-part.lengths, kind="stable"), part.lengths, part.sequence)
        for numbers in passes(part.lengths, order):
            logits[torch.from_numpy(numbers)] = objective.logits(part.batch(numbers).to(loaded.device)).cpu()
        return [prediction(row, labels) for row in logits]

    @staticmethod
    def in_words(prediction: dict[str, Any]) -> str:
        """Returns the labels with their probabilities, or the score."""
        if "scores" not in prediction:
            return Predicts.in_words(prediction)
        chosen = prediction["labels"] if "labels" in prediction else [prediction["label"]]
        return ", ".join(f"{label} ({prediction['scores'][label]:.1%})" for label in chosen) or "(no label)"
