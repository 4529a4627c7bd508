"""Trains embedding models: texts of similar meaning get similar vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from sansgpu.config import SETTINGS, Config, ConfigError
from sansgpu.config.paths import local_path
from sansgpu.data.headers import require_embedding_columns
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.rows import BadRows
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import open_single, open_sources
from sansgpu.data.split import describe_split
from sansgpu.machine.memory import effective_batch
from sansgpu.models.huggingface.costs import PretrainedCosts
from sansgpu.models.huggingface.pretrained import load_tokenizer_of
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout, Pooling, pool, read_layout, write_layout
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.tasks.embed.data import (
    EmbeddingCorpus,
    TextShape,
    cut_note,
    score_scale,
    split_rows,
    tokenize,
    tokenize_groups,
    with_scores_in_range,
)
from sansgpu.tasks.embed.evaluate import EmbeddingEvaluator
from sansgpu.tasks.embed.groups import TextGroups, TokenizedGroups, text_groups
from sansgpu.tasks.embed.losses import LossName, embedding_loss, loss_for
from sansgpu.tasks.embed.rows import TextRow, read_text_rows
from sansgpu.tasks.evaluation import require_rows
from sansgpu.tasks.fine_tuning import FineTuning, FineTuningTask, passes, require_examples
from sansgpu.tasks.trained_model import EvaluationRequest, TrainedModel

USUAL_TEXTS = 2  # texts of an example, assumed if the data has not been read
DEFAULT_LENGTH = 256  # tokens of the longest text, where the model does not say


class EmbeddingObjective(FineTuning):
    """A model without a head, whose hidden states are pooled to a vector for each text, and its loss."""

    head_kind = "none"

    def __init__(self, config: Config, random: bool = False, layers: int | None = None, frozen: bool = False) -> None:
        super().__init__(config, random, layers, frozen)
        self.layout = embedding_layout(config, self.unpadded.causal)
        self.width = int(self.model.config.get_text_config().hidden_size)
        self.dims: Sequence[int] = config.training.matryoshka_dims or ()
        if self.dims and max(self.dims) > self.width:
            raise ConfigError(
                f"training.matryoshka_dims has {max(self.dims)}, but the vectors of {config.model.name_or_path} have "
                f"{self.width} features; leave it out."
            )

    @property
    def loss_name(self) -> LossName:
        name = self.config.training.embedding_loss
        return "ranking" if name == "auto" else name

    def vectors(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the vectors of concatenated texts, (S, D) fp32."""
        return pool(self.unpadded.hidden_states(tokens, lengths), lengths, self.layout)

    def outputs(self, batch: TextGroups) -> torch.Tensor:
        with self.forward_pass():
            return self.vectors(batch.tokens, batch.lengths)

    def step_loss(self, outputs: torch.Tensor, batches: Sequence[TextGroups]) -> torch.Tensor:
        return embedding_loss(self.loss_name, self.dims, outputs, TextGroups.joined(batches))

    def summed_loss(self, batch: TextGroups) -> torch.Tensor:
        return self.step_loss(self.vectors(batch.tokens, batch.lengths), [batch])

    def write_more(self, folder: Path) -> None:
        write_layout(self.layout, self.width, folder)

    @classmethod
    def costs(cls, config: Config) -> PretrainedCosts:
        return replace(super().costs(config), window=USUAL_TEXTS * config.window)

    @classmethod
    def with_vocabulary(cls, config: Config) -> Config:
        """Sets data.max_length, by default the model's."""
        if config.data.max_length is not None:
            return config
        layout = read_layout(config.model)
        length = min(layout.max_length or DEFAULT_LENGTH if layout else DEFAULT_LENGTH, _longest(config))
        return _changed(config, "data", max_length=length)


def _longest(config: Config) -> int:
    """Returns the most tokens that the model can read; not every tokenizer knows them."""
    places = getattr(pretrained_config(config.model).get_text_config(), "max_position_embeddings", None)
    length = int(load_tokenizer_of(config.model).model_max_length)
    return min(length, places) if places else length


def _changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def embedding_layout(config: Config, causal: bool) -> EmbeddingLayout:
    """Returns the configured layout, by default that of the model, or else the one usual for its attention."""
    model, known = config.model, read_layout(config.model)
    usual: Pooling = "last" if causal else "mean"
    normalize = known.normalize if known else config.training.embedding_loss != "triplet"
    pooling = model.pooling if model.pooling != "auto" else known.pooling if known else usual
    prompts = (known.prompts, known.default_prompt) if known else ({}, None)
    return EmbeddingLayout(pooling, normalize, config.data.max_length, *prompts)


class TextEmbedding(EmbeddingObjective, FineTuningTask):
    """`task: embed`."""

    settings = SETTINGS["embed"]
    verbs = ("evaluate", "embed", "export")
    verbs_for_any_model = ("embed",)
    objective_class = EmbeddingObjective
    evaluator: EmbeddingEvaluator

    def __init__(self, config: Config, corpus: EmbeddingCorpus, effective_batch: int) -> None:
        super().__init__(config)
        self.use_corpus(corpus, effective_batch)
        self.evaluator = EmbeddingEvaluator(self, corpus.validation, self.loss_name, effective_batch)

    @classmethod
    def prepare(cls, config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, EmbeddingCorpus]:
        """Reads and tokenizes the rows. Raises ConfigError if there are too few, or one is invalid."""
        config = cls.with_vocabulary(config)
        require_embedding_columns(config.data)
        sources, data, notes = open_sources(config.data, text_rows=True), config.data, list[str]()
        train_rows, held_rows = BadRows(data.on_bad_row), BadRows("skip")
        name, held_name = sources.train.name, f"validation rows of {sources.train.name}"
        rows = read_text_rows(sources.train.rows(), data, train_rows)
        require_examples(sources, [len(rows)], "row", train_rows.notes())
        scale = score_scale(rows, data)
        rows = with_scores_in_range(rows, scale, train_rows)
        split = None
        if sources.validation is not None:
            held_name, form = sources.validation.name, rows[0].form
            train, held = rows, read_text_rows(sources.validation.rows(), data, held_rows, form)
            held = with_scores_in_range(held, scale, held_rows)
        else:
            train, held = split_rows(rows, data.validation_split)
            split = describe_split(len(train), len(held), "row", data.validation_split)
        loss = loss_for(rows, config.training.embedding_loss)
        config = _changed(_changed(config, "training", embedding_loss=loss), "data", score_scale=scale)
        splits = (
            cls._tokenized(train, config, progress, train_rows, name, notes),
            cls._tokenized(held, config, progress, held_rows, held_name, notes),
        )
        require_examples(sources, [len(part) for part in splits], "row", notes)
        if note := cut_note(splits[0], config.window):
            notes.append(f"{note}.")
        fingerprint = f"{sources.train.fingerprint[:16]}-{loss}-{len(splits[0])}-{splits[0].lengths.sum()}"
        return config, EmbeddingCorpus(*splits, notes, fingerprint, load_tokenizer_of(config.model), split=split)

    @classmethod
    def _tokenized(
        cls,
        rows: list[TextRow],
        config: Config,
        progress: ReportProgress,
        bad_rows: BadRows,
        name: str,
        notes: list[str],
    ) -> TokenizedGroups:
        size = sum(len(text) for row in rows for text in row.texts)
        progress("tokenizing", size, size)
        tokenizer, layout = load_tokenizer_of(config.model), read_layout(config.model)
        prompt = layout.prompt() if layout else ""
        shape = TextShape(tokenizer, config.window, prompt, config.training.seed, config.data.score_scale)
        return tokenize_groups(rows, shape, bad_rows, name, notes)

    def batch(self, step: int, total_steps: int | None = None) -> TextGroups:
        part, seed = self.corpus.train, self.config.training.seed
        indices = batch_indices(seed, step, len(part), self._effective_batch)
        epoch = step // steps_per_epoch(len(part), self._effective_batch)
        batch: TextGroups = part.batch(self.ordered(indices, part.lengths), epoch)
        return batch

    @classmethod
    def random_batch(cls, config: Config, size: int, tokens: int | None = None) -> TextGroups:
        """Builds `size` pairs of random tokens; `tokens` is the length of a pair."""
        length = None if tokens is None else -(-tokens // USUAL_TEXTS)
        drawn = cls.random_tokens(config, USUAL_TEXTS * size, length)
        pairs = [drawn[first : first + USUAL_TEXTS] for first in range(0, len(drawn), USUAL_TEXTS)]
        return text_groups(pairs, np.arange(len(drawn)), np.zeros(size), np.arange(size))

    def gather(self, all_gather_rows: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        self.evaluator.gather(all_gather_rows)

    @classmethod
    def evaluation_batch(cls, config: Config) -> int:
        return 32

    @classmethod
    def recognizes(cls, target: str) -> bool:
        return (local_path(target) / "modules.json").is_file()

    @classmethod
    def evaluator_for(cls, loaded: TrainedModel, request: EvaluationRequest) -> EmbeddingEvaluator:
        config = loaded.config
        if request.data is None:
            part, name = cast(EmbeddingCorpus, request.own_corpus()).validation, "validation rows"
            loss = loaded.objective.loss_name
        else:
            data = config.data.for_dataset(request.data)
            require_embedding_columns(data)
            source, bad_rows, notes = open_single(request.data, data, text_rows=True), BadRows("skip"), list[str]()
            rows, name = read_text_rows(source.rows(), data, bad_rows), source.name
            if not rows:
                raise ConfigError(bad_rows.first or f"{name} has no rows.")
            scale = score_scale(rows, data) if rows[0].form == "scores" else None
            rows = with_scores_in_range(rows, scale, bad_rows)
            config = _changed(config, "data", score_scale=scale)
            part = cls._tokenized(rows, config, request.progress, bad_rows, name, notes)
            for note in notes:
                request.warn(note)
            loss = loss_for(rows, "auto")
        require_rows(part, name)
        return EmbeddingEvaluator(loaded.objective, part, loss, effective_batch(config.training))


def encode_texts(
    loaded: TrainedModel, texts: Sequence[str], encoded: Callable[[int], None] = lambda done: None, prompt: str = ""
) -> np.ndarray:
    """Returns the vectors of texts, (S, D) float32, from a model that `jobs.embed.open_encoder` loaded.

    Calls `encoded` with the number of texts done. `prompt` is written before each text. Raises ConfigError if the
    tokenizer finds no tokens in a text.
    """
    tokens = tokenize(texts, loaded.tokenizer, loaded.config.window, prompt)
    if empty := next((number for number, ids in enumerate(tokens, 1) if not len(ids)), None):
        raise ConfigError(f"the tokenizer finds no tokens in text {empty}; leave it out.")
    vectors = np.empty((len(texts), loaded.objective.width), np.float32)
    autocast = torch.autocast(loaded.device.type, torch.bfloat16, enabled=loaded.precision == "bf16")
    with torch.inference_mode(), autocast:
        lengths, done = np.array([len(ids) for ids in tokens]), 0
        encoded(done)
        for numbers in passes(lengths):
            flat = torch.from_numpy(np.concatenate([tokens[n] for n in numbers]).astype(np.int64)).to(loaded.device)
            own_lengths = torch.from_numpy(lengths[numbers]).to(loaded.device)
            vectors[numbers] = loaded.objective.vectors(flat, own_lengths).cpu().numpy()
            done += len(numbers)
            encoded(done)
    return vectors
