"""Pretrains a decoder from scratch by next-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sansgpu.config import Config, ConfigError, derive_seed
from sansgpu.data.batch import Batch
from sansgpu.data.order import batch_indices
from sansgpu.data.pack import Windows, make_windows, piece_length
from sansgpu.data.shards import ReportProgress, TokenStore, build_store, build_tokenizer
from sansgpu.data.sources import open_sources
from sansgpu.data.split import TokenRanges, all_documents, split_documents
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.kernels.cross_entropy import LossOptions
from sansgpu.models import TransformerLM
from sansgpu.models.decoder_costs import DecoderCosts
from sansgpu.models.generate import Sampling, generate
from sansgpu.models.huggingface import export_model
from sansgpu.tasks.language_modeling import LanguageModeling
from sansgpu.tasks.task import Sums
from sansgpu.tasks.vocabulary import with_expected_vocabulary, with_vocabulary_of


@dataclass(frozen=True)
class TextCorpus:
    """Tokenized text, cut into windows."""

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    example_tokens: float
    train_tokens: int
    validation_tokens: int
    fingerprint: str

    @property
    def train_examples(self) -> int:
        return len(self.train)

    def most_tokens(self, examples: int) -> int:
        return examples * int(self.example_tokens)

    @property
    def notes(self) -> Sequence[str]:
        return ()  # no text is dropped

    def preview(self) -> str | None:
        return None  # every token has a loss


class PretrainObjective:
    """A decoder and its loss."""

    def __init__(self, config: Config) -> None:
        self._loss_shape = LossOptions(config.training.label_smoothing, config.training.z_loss)
        self.model = TransformerLM(config.model, derive_seed(config.training.seed, "model"))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Computes the summed cross-entropy with the configured label smoothing and z-loss, ()."""
        return self.model.summed_loss(
            batch.inputs, batch.targets, batch.positions, batch.document_ids, self._loss_shape
        )

    def step_sums(self) -> Sums:
        return {}

    def step_metrics(self, sums: Sums) -> dict[str, float]:
        return {}

    def compile(self, on: bool) -> None:
        self.model.compile_blocks(on)

    def between_blocks(self, callback: Callable[[], None]) -> None:
        self.model.before_block = callback


class Pretrain(PretrainObjective):
    """`task: pretrain`."""

    def __init__(self, config: Config, corpus: TextCorpus, effective_batch: int) -> None:
        super().__init__(config)
        self.corpus, self._config = corpus, config
        self._effective_batch = effective_batch
        self._measured = LanguageModeling(self.model, corpus.validation)
        self.fingerprint, self.notes = corpus.fingerprint, ()
        self.flops_per_token = self.costs(config).work(1).needed

    @staticmethod
    def prepare(config: Config, cache: Path, progress: ReportProgress) -> tuple[Config, TextCorpus]:
        """Tokenizes the data and sets model.vocab_size.

        Raises ConfigError if there is not enough data, or a configured vocabulary is smaller than the tokenizer's.
        """
        sources = open_sources(config.data)
        tokenizer = build_tokenizer(config.data, sources.train, cache, progress)
        config = with_vocabulary_of(config, tokenizer.vocab_size)
        store = build_store(sources.train, tokenizer, cache, progress)
        if sources.validation is not None:
            held = build_store(sources.validation, tokenizer, cache, progress)
            train, validation = all_documents(store), all_documents(held)
        else:
            train, validation = split_documents(store, config.data.validation_split)
        _require_tokens(config, train, validation, store)
        pack, window = config.data.pack_sequences, config.window
        fingerprint = f"{sources.train.fingerprint[:16]}-{len(store.tokens)}-{train.token_count}-{window}-{pack}"
        return config, TextCorpus(
            tokenizer,
            make_windows(train, window, tokenizer.end_id, pack),
            make_windows(validation, window, tokenizer.end_id, pack),
            window,
            train.token_count,
            validation.token_count,
            fingerprint,
        )

    @staticmethod
    def objective(config: Config, layers: int | None = None) -> PretrainObjective:
        if layers is None:
            return PretrainObjective(config)
        model = config.model.model_copy(update={"n_layers": layers})
        return PretrainObjective(config.model_copy(update={"model": model}))

    @staticmethod
    def random_batch(config: Config, size: int, tokens: int | None = None) -> Batch:
        """Builds `size` windows of random tokens, each a single document. Windows are full, so `tokens` is ignored."""
        assert config.model.vocab_size is not None
        draws = torch.Generator().manual_seed(derive_seed(config.training.seed, "trial"))
        shape = (size, config.window + 1)
        drawn = torch.randint(0, config.model.vocab_size, shape, generator=draws)
        inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        positions = torch.arange(config.window).expand_as(inputs).contiguous()
        return Batch(inputs, targets, positions, torch.zeros_like(inputs))

    @staticmethod
    def with_vocabulary(config: Config) -> Config:
        return with_expected_vocabulary(config)

    @staticmethod
    def costs(config: Config) -> DecoderCosts:
        return DecoderCosts(config.model, config.training, config.window, config.window)

    def batch(self, step: int, total_steps: int | None = None) -> Batch:
        """Returns the global batch of a step, cut into shorter pieces during the window warm-up."""
        training, window = self._config.training, self._config.window
        indices = batch_indices(training.seed, step, len(self.corpus.train), self._effective_batch)
        batch = self.corpus.train.batch(indices)
        piece = window if total_steps is None else piece_length(training, window, step, total_steps)
        return batch.in_pieces(piece) if piece < window else batch

    def validation_batches(self, size: int) -> Iterator[Batch]:
        return self._measured.validation_batches(size)

    def evaluate(self, batch: Batch) -> Sums:
        return self._measured.evaluate(batch)

    def metrics(self, sums: Sums) -> dict[str, float]:
        return self._measured.metrics(sums)

    def sample(self, prompt: str, tokens: int, seed: int) -> str:
        return "".join(generate(self.model, self.corpus.tokenizer, prompt, tokens, Sampling(seed=seed)))

    def save_tokenizer(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)

    def export(self, folder: Path) -> None:
        """Writes weights, config, tokenizer and generation config."""
        export_model(self.model, self.corpus.tokenizer, folder)


def _require_tokens(config: Config, train: TokenRanges, validation: TokenRanges, store: TokenStore) -> None:
    if train.token_count < config.window:
        raise ConfigError(
            f"{store.name} has {train.token_count} tokens to train on, less than one window of {config.window}; "
            "add more text or lower data.max_length."
        )
    if validation.token_count < 2:
        raise ConfigError(
            f"the validation part of {store.name} is empty; raise data.validation_split or set data.validation_name."
        )
