"""`task: embed` trains a model to give similar embeddings to texts of similar meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.pairs import TEXT_GROUPS, TextRow, read_text_rows
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.row_report import RowReport
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_leak, describe_split
from sansgpu.data.tables import Columns
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.disk import file_sha256
from sansgpu.machine.memory import effective_batch
from sansgpu.models.huggingface.sentence_embedding import (
    DENSE_WEIGHTS,
    MODULES,
    EmbeddingLayout,
    is_static_folder,
    read_layout,
)
from sansgpu.models.huggingface.source import model_file
from sansgpu.models.huggingface.tokenizer_files import load_tokenizer_of
from sansgpu.tasks.capabilities import Embeds, ignore_count
from sansgpu.tasks.embed.data import (
    EmbeddingCorpus,
    TextShape,
    cut_note,
    prompt_note,
    score_range,
    split_rows,
    tokenize_groups,
    with_scores_in_range,
)
from sansgpu.tasks.embed.evaluate import EmbeddingEvaluator
from sansgpu.tasks.embed.groups import TextGroups, TokenizedGroups, text_groups
from sansgpu.tasks.embed.losses import loss_for
from sansgpu.tasks.embed.objective import USUAL_TEXTS, EmbeddingObjective, encode_texts, with_prompts
from sansgpu.tasks.embed.pair_labels import pair_meaning, with_meaning
from sansgpu.tasks.embed.settings import SETTINGS, EmbeddingDataConfig, EmbeddingTrainingConfig
from sansgpu.tasks.evaluation import require_rows
from sansgpu.tasks.fine_tuning import StepWideTask, require_examples
from sansgpu.tasks.task import EvaluationRequest, TrainedModel, Verb


class TextEmbedding(Embeds, StepWideTask):
    """`task: embed`."""

    settings = SETTINGS
    verbs_for_any_model: ClassVar[tuple[Verb, ...]] = ("embed",)
    objective_class = EmbeddingObjective
    evaluator: EmbeddingEvaluator

    def __init__(self, config: Config, corpus: EmbeddingCorpus, effective_batch: int) -> None:
        super().__init__(config, corpus, effective_batch)
        loss = self.objective.loss_name
        self.evaluator = EmbeddingEvaluator(self.objective, corpus.validation, loss, effective_batch)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, EmbeddingCorpus]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        config = cls.with_vocabulary(config)
        data, _ = resolve_columns(EmbeddingDataConfig.of(config), TEXT_GROUPS)
        sources, columns = open_sources(data, TEXT_GROUPS.text_rows, progress), Columns.of(data)
        notes = sources.notes
        train_rows, held_rows = RowReport.of(data), RowReport.of(data)
        name, held_name = sources.train.name, f"validation rows of {sources.train.name}"
        rows = read_text_rows(sources.train.rows(), columns, train_rows)
        require_examples(sources, [len(rows)], "row", train_rows.notes())
        read_as = rows[0].kind
        meaning, note = pair_meaning(rows, data, name)
        notes += [note] if note else []
        rows = with_meaning(rows, meaning, train_rows, name, notes)
        limits = score_range(rows, data)
        rows = with_scores_in_range(rows, limits, train_rows)
        require_examples(sources, [len(rows)], "row", train_rows.notes())
        if limits is not None and (note := limits.describe(rows)):
            notes.append(f"{name}: {note}.")
        split = None
        if sources.validation is not None:
            held_name = sources.validation.name
            train, held = rows, read_text_rows(sources.validation.rows(), columns, held_rows, read_as)
            held = with_meaning(held, meaning, held_rows, held_name, notes)
            held = with_scores_in_range(held, limits, held_rows)
        else:
            train, held = split_rows(rows, data.validation_split)
            split = describe_split(len(train), len(held), "row", data.validation_split)
        loss = loss_for(rows, EmbeddingTrainingConfig.of(config).embedding_loss)
        scale = limits.scale if limits else None
        config = config.with_values("training", embedding_loss=loss).with_values("data", score_scale=scale)
        config, shape = cls.text_shape(config, train)
        splits = (
            _tokenized(train, shape, progress, train_rows, name, notes),
            _tokenized(held, shape, progress, held_rows, held_name, notes),
        )
        require_examples(sources, [len(part) for part in splits], "row", notes)
        if note := prompt_note(train, shape.layout):
            notes.append(f"{note}.")
        if leak := describe_leak((row.texts for row in train), [row.texts for row in held], "row"):
            notes.append(f"{leak}.")
        if note := cut_note(splits[0], config.window):
            notes.append(f"{note}.")
        fingerprint = f"{sources.train.fingerprint[:16]}-{loss}-{len(splits[0])}-{splits[0].lengths.sum()}"
        return config, EmbeddingCorpus(*splits, notes, fingerprint, shape.tokenizer, split=split)

    @classmethod
    def base_fingerprint(cls, config: Config) -> str:
        layout = read_layout(config.model)
        names = [f"{path}/{name}" for path in (layout.dense if layout else ()) for name in DENSE_WEIGHTS]
        files = filter(None, (model_file(config.model, name) for name in names))
        return "-".join([super().base_fingerprint(config), *(file_sha256(file)[:16] for file in files)])

    @classmethod
    def text_shape(cls, config: Config, train: Sequence[TextRow]) -> tuple[Config, TextShape]:
        """Returns the settings that depend on the tokenizer, and how to tokenize. `train` are the training rows."""
        own = read_layout(config.model) or EmbeddingLayout("mean", normalize=True)
        layout = with_prompts(own, EmbeddingDataConfig.of(config))
        return config, shape_of(config, load_tokenizer_of(config.model), layout)

    def batch(self, step: int, total_steps: int | None = None) -> TextGroups:
        part, seed = self.corpus.train, self.config.training.seed
        indices = batch_indices(seed, step, len(part), self._effective_batch)
        epoch = step // steps_per_epoch(len(part), self._effective_batch)
        batch: TextGroups = part.batch(self.objective.ordered(indices, part.lengths), epoch)
        return batch

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> TextGroups:
        """Builds `size` pairs of texts of random tokens; `tokens` is the length of a pair."""
        length = None if tokens is None else -(-tokens // USUAL_TEXTS)
        drawn = cls.objective_class.random_tokens(config, USUAL_TEXTS * size, length)
        pairs = [drawn[first : first + USUAL_TEXTS] for first in range(0, len(drawn), USUAL_TEXTS)]
        return text_groups(pairs, np.arange(len(drawn)), np.zeros(size), np.arange(size))

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 32

    @classmethod
    def recognizes(cls, target: str) -> bool:
        folder = local_path(target)
        return (folder / MODULES).is_file() and not is_static_folder(folder)

    @classmethod
    def encode_texts(
        cls, loaded: TrainedModel, texts: Sequence[str], encoded: Callable[[int], None] = ignore_count, prompt: str = ""
    ) -> np.ndarray:
        return encode_texts(loaded, texts, encoded, prompt)

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> EmbeddingEvaluator:
        config = loaded.config
        if request.data is None:
            part, name = cast(EmbeddingCorpus, request.own_corpus()).validation, "validation rows"
            loss = loaded.objective.loss_name
        else:
            data, _ = resolve_columns(EmbeddingDataConfig.of(config).for_dataset(request.data), TEXT_GROUPS)
            source = open_single(request.data, data, TEXT_GROUPS.text_rows)
            bad_rows, notes = RowReport("skip"), list(source.notes)
            rows, name = read_text_rows(source.rows(), Columns.of(data), bad_rows), source.name
            if not rows:
                raise ConfigError(bad_rows.first or f"{name} has no rows; pass a file with at least one.")
            meaning, note = pair_meaning(rows, data, name)
            notes += [note] if note else []
            rows = with_meaning(rows, meaning, bad_rows, name, notes)
            limits = score_range(rows, data)
            rows = with_scores_in_range(rows, limits, bad_rows)
            config = config.with_values("data", score_scale=limits.scale if limits else None)
            shape = shape_of(config, loaded.tokenizer, loaded.objective.layout)
            part = _tokenized(rows, shape, request.progress, bad_rows, name, notes)
            for note in notes:
                request.warn(note)
            loss = loss_for(rows, "auto")
        require_rows(part, name)
        return EmbeddingEvaluator(loaded.objective, part, loss, effective_batch(config.training))


def shape_of(config: Config, tokenizer: Any, layout: EmbeddingLayout) -> TextShape:
    """Returns how to tokenize rows for a model with this tokenizer and the prompts of this layout."""
    return TextShape(tokenizer, config.window, layout, config.training.seed, EmbeddingDataConfig.of(config).score_scale)


def _tokenized(
    rows: list[TextRow], shape: TextShape, progress: ReportProgress, bad_rows: RowReport, name: str, notes: list[str]
) -> TokenizedGroups:
    size = sum(len(text) for row in rows for text in row.texts)
    progress("tokenizing", size, size)
    return tokenize_groups(rows, shape, bad_rows, name, notes)
