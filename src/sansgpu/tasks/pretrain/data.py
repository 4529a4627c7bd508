"""Reads, tokenizes and packs documents for pretraining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.order import step_limits
from sansgpu.data.pack import Windows, make_windows
from sansgpu.data.settings import CorpusDataConfig
from sansgpu.data.shards import TokenSizes, TokenStore, build_store
from sansgpu.data.sources import Sources, open_sources
from sansgpu.data.split import TokenRanges, all_documents, split_documents
from sansgpu.data.teacher_folder import Predictions, TeacherFolder
from sansgpu.data.tokenizer import Tokenizer, load_tokenizer
from sansgpu.events.progress import ReportProgress
from sansgpu.machine.memory import effective_batch
from sansgpu.models.architectures import DecoderConfig
from sansgpu.tasks.base import with_vocabulary_of
from sansgpu.tasks.distillation import with_length_of
from sansgpu.tasks.settings import DistilledTrainingConfig

# Bigrams help if the text has many tokens per token of the vocabulary and is read for the first time. With fewer, most
# pairs occur only once or twice; in later epochs the model relies on pairs that other texts do not have. Pairs of
# characters are learned in a few steps anyway. The bounds are between runs that gained and runs that lost; see
# docs/lab-notes.md.
MIN_BIGRAM_TEXT, MIN_BIGRAM_VOCABULARY = 200, 1024
MAX_BIGRAM_EPOCHS = 2


@dataclass(frozen=True)
class TextCorpus:
    """Tokenized documents, cut into windows."""

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    example_tokens: float
    validation_tokens: int
    fingerprint: str
    documents: TokenRanges  # those of `train`
    teacher: Predictions | None = None
    cleaning: Sequence[str] = ()  # messages on the documents that were left out

    @property
    def train_examples(self) -> int:
        return len(self.train)

    @property
    def train_tokens(self) -> int:
        return self.documents.token_count

    def most_tokens(self, examples: int, padded: bool) -> int:
        return examples * int(self.example_tokens)

    @property
    def notes(self) -> Sequence[str]:
        return ()  # nothing is truncated or dropped

    def preview(self) -> str | None:
        return None  # every token is a target


def open_documents(config: Config, cache: Path, progress: ReportProgress) -> tuple[Sources, list[str]]:
    """Opens the training and validation documents. Those of the training data are limited and cleaned as configured.

    Also returns a message for each kind of cleaning. Raises ConfigError.
    """
    data, notes, quality = CorpusDataConfig.of(config), list[str](), None
    if data.quality_model is not None:
        from sansgpu.tasks.pretrain.quality import QualityFilter

        quality = QualityFilter.open(config)
    sources = open_sources(data, progress=progress)
    notes += sources.notes
    train = sources.train
    if data.max_gb is not None:
        from sansgpu.data.cleaning import first_bytes

        train = first_bytes(train, data.max_gb)
    if data.deduplicate != "none":
        from sansgpu.data.cleaning import without_duplicates

        train, note = without_duplicates(train, sources.validation, data.deduplicate, cache, progress)
        notes.append(note)
    if quality is not None:
        train, note = quality.best_documents(train, cache, progress)
        notes.append(note)
    return replace(sources, train=train), notes


def read_parts(
    config: Config, sources: Sources, tokenizer: Tokenizer, cache: Path, progress: ReportProgress
) -> tuple[TokenRanges, TokenRanges, str]:
    """Tokenizes and splits the documents. Returns training documents, validation documents and a data fingerprint.

    Raises ConfigError if there are too few tokens.
    """
    store = build_store(sources.train, tokenizer, cache, progress, CorpusDataConfig.of(config).max_tokens)
    if sources.validation is not None:
        held = build_store(sources.validation, tokenizer, cache, progress)
        train, validation = all_documents(store), all_documents(held)
    else:
        train, validation = split_documents(store, config.data.validation_split)
    _require_tokens(config, train, validation, store)
    pack, window = config.data.pack_sequences, config.window
    name = f"{sources.train.fingerprint[:16]}-{len(store.tokens)}-{train.token_count}-{window}-{pack}"
    return train, validation, name


def corpus_of(
    config: Config,
    tokenizer: Tokenizer,
    train: TokenRanges,
    validation: TokenRanges,
    fingerprint: str,
    teacher: Predictions | None = None,
) -> TextCorpus:
    pack, window = config.data.pack_sequences, config.window
    return TextCorpus(
        tokenizer,
        make_windows(train, window, tokenizer.end_id, pack),
        make_windows(validation, window, tokenizer.end_id, pack),
        window,
        validation.token_count,
        fingerprint,
        train,
        teacher,
    )


def with_initialization(config: Config, tokens: int) -> Config:
    """Chooses how the model is initialized, if it is `auto`, for a text of this many tokens."""
    model, teacher = DecoderConfig.of(config), DistilledTrainingConfig.of(config).distillation.teacher
    if model.initialization != "auto":
        return config
    assert model.vocab_size is not None
    # A teacher's predictions correct pairs that the text has too rarely or too often.
    is_long = tokens >= MIN_BIGRAM_TEXT * model.vocab_size or teacher is not None
    is_useful = model.vocab_size >= MIN_BIGRAM_VOCABULARY and is_long and _epochs(config, tokens) <= MAX_BIGRAM_EPOCHS
    chosen = "bigram" if is_useful and model.bigram_problem() is None else "random"
    return config.with_values("model", initialization=chosen)


def _epochs(config: Config, tokens: int) -> float:
    """Returns how often a run at most reads its text, or 0 for a time-limited run, whose steps are not known yet."""
    training = config.training
    if training.time_limited:
        return 0.0
    steps_per_epoch = tokens / (effective_batch(training) * config.window)
    return min(step_limits(training, steps_per_epoch, tokens), default=steps_per_epoch) / steps_per_epoch


def taught_corpus(config: Config, folder: TeacherFolder, progress: ReportProgress) -> tuple[Config, TextCorpus]:
    """Opens a teacher's folder: its documents, tokenizer and predictions."""
    tokenizer = load_tokenizer(folder.root)
    config = with_vocabulary_of(with_length_of(config, folder), tokenizer.vocab_size)
    if config.roots > config.model.max_seq_len:
        raise ConfigError(
            f"model.max_seq_len is {config.model.max_seq_len}, but the examples of {folder.root} have "
            f"{counted(config.roots, 'token')}; raise it."
        )
    train, validation = (_ranges_of(folder, part) for part in ("train", "validation"))
    config = with_initialization(config, train.token_count)
    sizes = TokenSizes(validation.tokens, tokenizer.token_bytes(), folder.array("validation_sizes"))
    predictions = Predictions(folder, progress)
    validation = replace(validation, sizes=sizes)
    return config, corpus_of(config, tokenizer, train, validation, folder.fingerprint, predictions)


def arrays_of(part: str, ranges: TokenRanges) -> dict[str, np.ndarray]:
    """Returns the concatenated tokens of the documents, and their lengths."""
    pieces = [ranges.tokens[start:stop] for start, stop in zip(ranges.starts, ranges.stops, strict=True)]
    return {f"{part}_tokens": np.concatenate(pieces), f"{part}_lengths": ranges.stops - ranges.starts}


def _ranges_of(folder: TeacherFolder, part: str) -> TokenRanges:
    stops = np.cumsum(folder.array(f"{part}_lengths"))
    return TokenRanges(folder.array(f"{part}_tokens"), stops - folder.array(f"{part}_lengths"), stops)


def _require_tokens(config: Config, train: TokenRanges, validation: TokenRanges, store: TokenStore) -> None:
    if train.token_count < config.window:
        raise ConfigError(
            f"{store.name} has only {counted(train.token_count, 'token')} for training, less than one window of "
            f"{config.window}; add more text or lower data.max_length."
        )
    if validation.token_count < 2:
        raise ConfigError(
            f"the validation split of {store.name} is empty; raise data.validation_split or set data.validation_name."
        )
