"""Next-token prediction from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sansgpu.config import Config, ConfigError, fold_seed
from sansgpu.data.batch import Batch
from sansgpu.data.order import batch_indices, steps_per_epoch
from sansgpu.data.pack import Windows, make_windows
from sansgpu.data.shards import Progress, TokenStore, build_store, build_tokenizer
from sansgpu.data.sources import open_sources
from sansgpu.data.split import TokenRanges, all_documents, split_documents
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.kernels.cross_entropy import LossShape
from sansgpu.models import TransformerLM
from sansgpu.models.generate import Sampling, generate
from sansgpu.models.huggingface import export_model
from sansgpu.tasks.language_modelling import LanguageModelling
from sansgpu.tasks.task import Sums

VOCABULARY_MULTIPLE = 64  # rows of the embedding are padded to this, which matmuls like


@dataclass(frozen=True)
class Corpus:
    """Tokenised text, cut into windows."""

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    train_tokens: int
    fingerprint: str


class Pretrain:
    """`task: pretrain`."""

    def __init__(self, config: Config, corpus: Corpus, effective_batch: int) -> None:
        self.corpus, self._config = corpus, config
        self._loss_shape = LossShape(config.training.label_smoothing, config.training.z_loss)
        self._effective_batch = effective_batch
        self.model = TransformerLM(config.model, fold_seed(config.training.seed, "model"))
        self._measured = LanguageModelling(self.model, corpus.tokenizer, corpus.validation)
        self.fingerprint = corpus.fingerprint
        self.steps_per_epoch = steps_per_epoch(len(corpus.train), effective_batch)
        self.tokens_per_epoch = corpus.train_tokens
        self.flops_per_token = self.model.flops_per_token(config.window)

    @staticmethod
    def prepare(config: Config, cache: Path, progress: Progress) -> tuple[Config, Corpus]:
        """Tokenize the data, and settle what of the configuration depends on it: the vocabulary.

        Raises ConfigError where there is not enough data, or the vocabulary does not hold its tokens.
        """
        sources = open_sources(config.data)
        tokenizer = build_tokenizer(config.data, sources.train, cache, progress)
        config = _with_vocabulary(config, tokenizer)
        store = build_store(sources.train, tokenizer, cache, progress)
        if sources.validation is not None:
            held = build_store(sources.validation, tokenizer, cache, progress)
            train, validation = all_documents(store), all_documents(held)
        else:
            train, validation = split_documents(store, config.data.validation_split)
        _require_tokens(config, train, validation, store)
        pack, window = config.data.pack_sequences, config.window
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(store.tokens)}-{train.token_count}-{window}-{pack}"
        return config, Corpus(
            tokenizer,
            make_windows(train, window, tokenizer.end_id, pack),
            make_windows(validation, window, tokenizer.end_id, pack),
            train.token_count,
            fingerprint,
        )

    @staticmethod
    def parameter_count(config: Config) -> int:
        """Parameters of the model, without making it."""
        return TransformerLM(config.model, seed=None).parameter_count

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        indices = batch_indices(self._config.training.seed, step, len(self.corpus.train), self._effective_batch)
        return self.corpus.train.batch(indices)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross-entropy summed over the targets, with what the configuration adds to it."""
        return self.model.summed_loss(
            batch.inputs, batch.targets, batch.positions, batch.document_ids, self._loss_shape
        )

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """The validation part in order, `size` windows at a time."""
        return self._measured.validation_batches(size)

    def evaluate(self, batch: Batch) -> Sums:
        """Loss, targets and the bytes they stand for."""
        return self._measured.evaluate(batch)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Loss, perplexity and bits per byte."""
        return self._measured.metrics(sums)

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        """What the model writes after `prompt`."""
        return "".join(generate(self.model, self.corpus.tokenizer, prompt, tokens, Sampling(seed=seed)))

    def compile(self, on: bool) -> None:
        """Compile block by block, or no longer."""
        self.model.compile_blocks(on)

    def save_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json."""
        self.corpus.tokenizer.save(folder)

    def export(self, folder: Path) -> None:
        """Write weights, config, tokenizer and generation config."""
        export_model(self.model, self.corpus.tokenizer, folder)


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    size = config.model.vocab_size
    if size is None:
        size = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})
    if size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size {size} is smaller than the tokenizer's {tokenizer.vocab_size}; raise it or leave it out."
        )
    return config


def _require_tokens(config: Config, train: TokenRanges, validation: TokenRanges, store: TokenStore) -> None:
    if train.token_count < config.window:
        raise ConfigError(
            f"{store.name} has {train.token_count} tokens to train on, less than one window of {config.window}; "
            "give more text or lower data.max_length."
        )
    if validation.token_count < 2:
        raise ConfigError(
            f"the validation part of {store.name} is empty; raise data.validation_split or set data.validation_name."
        )
