"""`task: tokens` trains a model to tag words: entities such as persons and places, or parts of speech."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.tags import TAGGED, untagged_text
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow, located
from sansgpu.data.sequences import PackedSequences
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import open_sources
from sansgpu.data.split import describe_split
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.probe import mixed_precision
from sansgpu.models.formats.folders import has_architecture
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.capabilities import Predicts
from sansgpu.tasks.evaluation import require_rows
from sansgpu.tasks.fine_tuning import FineTuningTask, require_examples, split_rows
from sansgpu.tasks.task import EvaluationRequest, TrainedModel
from sansgpu.tasks.tokens.data import TagCorpus, open_tagged, tokenize_texts
from sansgpu.tasks.tokens.evaluate import TagEvaluator
from sansgpu.tasks.tokens.objective import TokensObjective
from sansgpu.tasks.tokens.settings import SETTINGS
from sansgpu.tasks.tokens.tagged import in_iob2, read_tagged, require_labels

EVALUATION_WINDOWS = 64  # windows per forward pass in `eval` and `predict`


class Tokens(Predicts, FineTuningTask):
    """`task: tokens`."""

    settings = SETTINGS
    flag_columns = (("text",),)
    objective_class = TokensObjective
    evaluator: TagEvaluator

    def __init__(self, config: Config, corpus: TagCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        self.evaluator = TagEvaluator(self.objective, corpus.validation)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, TagCorpus]:
        """Reads and tokenizes the texts. Raises ConfigError if there are too few, or one is invalid."""
        data, numbered = resolve_columns(TaggedDataConfig.of(config), TAGGED)
        config = config.model_copy(update={"data": data})
        sources = open_sources(data)
        tokenizer = load_tokenizer_of(config.model)
        notes = sources.notes
        rows = {"training": RowReport.of(data), "validation": RowReport.of(data)}
        given = read_tagged(sources.train.rows(), rows["training"], data, "training texts", notes)
        texts = in_iob2(given, "training texts", notes)
        require_examples(sources, [len(texts)], "text", rows["training"].notes())
        labels = data.labels or require_labels(texts, sources.train.name)
        if numbered:
            notes.append(f"{numbered}, {counted(len(labels), 'tag')}.")
        split = None
        if sources.validation is not None:
            held = read_tagged(sources.validation.rows(), rows["validation"], data, "validation texts", notes)
            train, held = texts, in_iob2(held, "validation texts", notes, always=texts != given)
        else:
            train, held = split_rows(texts, [text.text.encode() for text in texts], data.validation_split)
            split = describe_split(len(train), len(held), "text", data.validation_split)
        parts = []
        for name, part in (("training", train), ("validation", held)):
            size = sum(len(text.text) for text in part)
            progress("tokenizing", size, size)
            parts.append(tokenize_texts(part, labels, config, tokenizer, rows[name], in_training=name == "training"))
            found = list(parts[-1].notes())
            rows[name].report(found.append)
            notes += [f"{name} texts: {note}" for note in found]
        require_examples(sources, [len(part) and len(part.texts) for part in parts], "text", notes)
        config = config.with_values("data", labels=labels)
        train_part, held_part = parts
        size = train_part.lengths.sum()
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(train_part.texts)}-{len(train_part)}-{size}"
        return config, TagCorpus(train_part, held_part, notes, fingerprint, tokenizer, split=split)

    @classmethod
    def recorded_settings(cls, config: Config, recorded: dict[str, Any]) -> list[str]:
        """Returns the recorded labels, so that a resumed run keeps the order of its logits."""
        labels = (recorded.get("data") or {}).get("labels")
        return [f"data.labels={json.dumps(labels)}"] if labels and config.data.labels is None else []

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return has_architecture(local_path(target), "ForTokenClassification")

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> PackedSequences:
        """Builds `size` windows of random tokens, each of which is a word with the first label."""
        drawn = cls.objective_class.random_tokens(config, size, tokens)
        return PackedSequences.of(drawn, [np.zeros(len(ids), np.int64) for ids in drawn])

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return EVALUATION_WINDOWS

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> TagEvaluator:
        if request.data is None:
            part, name = cast(TagCorpus, request.own_corpus()).validation, "validation texts"
        else:
            bad_rows, notes = RowReport("skip"), list[str]()
            source = open_tagged(request.data, TaggedDataConfig.of(loaded.config), notes)
            name, labels = source.name, loaded.objective.labels
            data = TaggedDataConfig.of(loaded.config).model_copy(update={"labels": labels})
            given = read_tagged(source.rows(), bad_rows, data, name, notes)
            texts = in_iob2(given, name, notes)
            part = tokenize_texts(texts, labels, loaded.config, loaded.tokenizer, bad_rows, in_training=False)
            for note in notes:
                request.warn(note)
        part.bad_rows.report(lambda note: request.warn(f"{name}: {note}"))
        require_rows(part, name)
        return TagEvaluator(loaded.objective, part)

    @classmethod
    def rows_to_predict(cls, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        return TAGGED.single_rows(rows)

    @classmethod
    def predict(cls, loaded: TrainedModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the `spans` in each row's `text` or `tokens`."""
        texts = [untagged_text(row) for row in located(rows)]
        part = tokenize_texts(texts, None, loaded.config, loaded.tokenizer, RowReport("fail"), in_training=False)
        evaluator = TagEvaluator(loaded.objective, part)
        with mixed_precision(loaded.device, loaded.precision):
            return evaluator.predictions(cls.evaluation_batch(loaded.config), loaded.device)

    @staticmethod
    def in_words(prediction: dict[str, Any]) -> str:
        """Formats each span as a line."""
        lines = (f"{s['start']}-{s['end']}  {s['label']}  {s['text']}  ({s['score']:.1%})" for s in prediction["spans"])
        return "\n".join(lines) or "(no spans)"
