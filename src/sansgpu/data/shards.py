"""Tokenizes a source once and caches the tokens in memory-mapped files.

A token store is a folder in the cache with `tokens.bin` (the tokens of all documents, with the tokenizer's special
tokens), `documents.bin` (one record per document) and, if token ids alone do not determine the text they cover,
`sizes.bin` (UTF-8 bytes of text covered by each token). The folder's name is a hash of all inputs. It is built under a
lock in a temporary folder and then renamed, so a store is either complete or missing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from filelock import FileLock

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.paths import TRAINED_TOKENIZERS
from sansgpu.data.files import Piece
from sansgpu.data.rows import SourceRow
from sansgpu.data.settings import CorpusDataConfig
from sansgpu.data.sources import Source
from sansgpu.data.tokenizer import BPETokenizer, CharTokenizer, Tokenizer, load_tokenizer
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import PRIVATE_MODE, atomic_folder, make_folder
from sansgpu.machine.disk import free_disk_bytes

T = TypeVar("T")
FORMAT = 1  # version of the store format, part of every cache key
ENCODE_CHARS = 4 << 20  # characters per call of the tokenizer: enough to keep all threads busy in little memory
CHECK_BLOCK = 1 << 24  # tokens whose ids are checked at a time, to bound the memory
MIN_BYTES_PER_TOKEN = 2  # lower bound for ordinary text; character tokenizers and rare scripts can be below it
USUAL_TOKEN_BYTES = 4  # bytes of English text per token of a trained BPE tokenizer
SIZE = np.dtype("<u4")
DOCUMENT = np.dtype([("end", "<u8"), ("content_hash", "<u8")])  # end: offset after its last token


@dataclass(frozen=True)
class TokenSizes:
    """UTF-8 bytes of text covered by each token of a store."""

    tokens: np.ndarray  # (N,), memory-mapped
    by_id: np.ndarray  # (V,) int64: bytes of each token id
    counted: np.ndarray | None  # (N,) uint32, memory-mapped: bytes of each token; None if `by_id` is always right

    def between(self, start: int, stop: int) -> int:
        """Returns the bytes covered by tokens [start, stop)."""
        return int(self.of_tokens(start, stop).sum(dtype=np.int64))

    def of_tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns the bytes covered by each of the tokens [start, stop)."""
        return self.by_id[self.tokens[start:stop]] if self.counted is None else self.counted[start:stop]


@dataclass(frozen=True)
class TokenStore:
    """The tokenized documents of one source."""

    name: str
    tokens: np.ndarray  # (N,) uint16 or uint32, memory-mapped
    documents: np.ndarray  # (D,) DOCUMENT
    sizes: TokenSizes | None = None


LEFT_OUT = "left_out.txt"  # number of characters, in the folder of a trained tokenizer


def build_tokenizer(data: DataConfig, source: Source, cache: Path, progress: ReportProgress) -> Tokenizer:
    """Loads the configured tokenizer. "bpe" and "char" are trained on `source` and cached."""
    if data.tokenizer not in TRAINED_TOKENIZERS:
        return load_tokenizer(data.tokenizer)
    max_tokens = data.max_tokens if isinstance(data, CorpusDataConfig) else None
    settings = (data.vocab_size, data.tokenizer_sample_mb) if data.tokenizer == "bpe" else ()
    key = cache_key("tokenizer", source.fingerprint, data.tokenizer, *settings, *_limits(max_tokens))

    def build(folder: Path) -> None:
        if data.tokenizer == "char":
            texts = (piece.text for piece in pieces_with_progress(source, "reading characters", progress))
            tokenizer: Tokenizer = CharTokenizer.train(_first(texts, max_tokens))
        else:
            limit = data.tokenizer_sample_mb * 1_000_000
            tokenizer = BPETokenizer.train(_sample(source, limit, max_tokens, progress), data.vocab_size)
        tokenizer.save(folder)
        if tokenizer.left_out:
            (folder / LEFT_OUT).write_text(str(tokenizer.left_out), encoding="utf-8")

    folder = cached(cache / "tokenizers" / key, build)
    tokenizer = load_tokenizer(folder)
    left_out = folder / LEFT_OUT
    tokenizer.left_out = int(left_out.read_text(encoding="utf-8")) if left_out.is_file() else 0
    return tokenizer


def left_out_note(tokenizer: Tokenizer) -> str | None:
    """Returns a message about text that a tokenizer was not trained on, or None."""
    if not tokenizer.left_out:
        return None
    return (
        f"the tokenizer was not trained on {tokenizer.left_out:,} characters in runs of thousands without white space, "
        "such as DNA, base64 or minified code; models learn little from such runs, so leave them out of the data, or "
        "set data.tokenizer to char for such data"
    )


def build_store(
    source: Source, tokenizer: Tokenizer, cache: Path, progress: ReportProgress, max_tokens: int | None = None
) -> TokenStore:
    """Returns the tokens of `source`, or its first `max_tokens`, from the cache, or tokenizes it.

    Raises ConfigError if it has no text.
    """
    tokenizer_key = hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest()
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
    edges = tokenizer.prefix_ids, tokenizer.suffix_ids
    key = cache_key("tokens", source.fingerprint, tokenizer_key, *edges, ENCODE_CHARS, *_limits(max_tokens))

    def build(folder: Path) -> None:
        with _Writer(folder, tokenizer, dtype) as writer:
            _tokenize(source, tokenizer, writer, progress, max_tokens)

    if not (cache / "tokens" / key).is_dir():
        _require_space(source, cache, dtype, max_tokens)
    folder = cached(cache / "tokens" / key, build)
    documents = np.fromfile(folder / "documents.bin", dtype=DOCUMENT)
    if not len(documents):
        raise ConfigError(f"{source.name} contains no text; set data.dataset_name to a dataset that is not empty.")
    tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
    file = folder / "sizes.bin"
    counted = np.memmap(file, dtype=SIZE, mode="r") if file.is_file() else None
    _require_intact(folder, tokens, documents, counted, tokenizer.vocab_size)
    return TokenStore(source.name, tokens, documents, TokenSizes(tokens, tokenizer.token_bytes(), counted))


def _require_intact(
    folder: Path, tokens: np.ndarray, documents: np.ndarray, counted: np.ndarray | None, vocab_size: int
) -> None:
    """Raises ConfigError if a file is truncated or an id is outside the vocabulary."""
    blocks = (tokens[start : start + CHECK_BLOCK] for start in range(0, len(tokens), CHECK_BLOCK))
    lengths = {len(tokens), int(documents["end"][-1]), len(tokens if counted is None else counted)}
    if len(lengths) > 1 or any(int(block.max()) >= vocab_size for block in blocks):
        raise ConfigError(f"the cached tokens in {folder} are damaged; delete that folder to create them again.")


def _limits(max_tokens: int | None) -> tuple[int, ...]:
    """Returns `max_tokens` as a part of a cache key, which is the same as before without it."""
    return () if max_tokens is None else (max_tokens,)


def _require_space(source: Source, cache: Path, dtype: np.dtype, max_tokens: int | None) -> None:
    tokens = source.size_bytes // MIN_BYTES_PER_TOKEN
    needed = (tokens if max_tokens is None else min(tokens, max_tokens)) * dtype.itemsize
    free = free_disk_bytes(cache.absolute())
    if needed > free:
        raise ConfigError(
            f"the tokens of {source.name} need about {needed / 1e9:.1f} GB, but {cache} has {free / 1e9:.1f} GB free; "
            "free some space or set data.cache_dir to another folder."
        )


class _Writer:
    """Writes the files of a store, document by document."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self._folder, self._dtype, self._by_id = folder, dtype, tokenizer.token_bytes()
        self._tokens, self._documents = ((folder / name).open("wb") for name in ("tokens.bin", "documents.bin"))
        self._sizes: IO[bytes] | None = None
        self._end = 0

    @property
    def count(self) -> int:
        """The number of tokens so far."""
        return self._end

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._tokens, self._documents, self._sizes):
            if file is not None:
                file.close()

    def add(self, ids: Sequence[int], sizes: np.ndarray | None = None) -> None:
        """Appends tokens. `sizes` are the bytes of text that each covers, if the ids do not determine them."""
        if sizes is not None and self._sizes is None:
            self._begin_sizes()
        tokens = np.asarray(ids, dtype=self._dtype)
        self._tokens.write(tokens.tobytes())
        self._end += len(tokens)
        if self._sizes is not None:
            self._sizes.write((self._by_id[tokens] if sizes is None else sizes).astype(SIZE).tobytes())

    def end_document(self, content_hash: int) -> None:
        """Writes the record of the current document."""
        self._documents.write(np.array([(self._end, content_hash)], dtype=DOCUMENT).tobytes())

    def _begin_sizes(self) -> None:
        """Creates sizes.bin and writes the sizes of all earlier tokens, computed from their ids."""
        self._tokens.flush()
        self._sizes = (self._folder / "sizes.bin").open("wb")
        if self._end:
            tokens = np.memmap(self._folder / "tokens.bin", dtype=self._dtype, mode="r")
            for start in range(0, self._end, CHECK_BLOCK):
                self._sizes.write(self._by_id[tokens[start : start + CHECK_BLOCK]].astype(SIZE).tobytes())


def _tokenize(
    source: Source, tokenizer: Tokenizer, writer: _Writer, progress: ReportProgress, max_tokens: int | None
) -> None:
    by_id, starts, content = tokenizer.token_bytes(), True, hashlib.blake2b(digest_size=8)

    def batch_chars() -> int:
        """Returns the size of the next batch, so that little more than `max_tokens` is read."""
        return (
            ENCODE_CHARS if max_tokens is None else min(ENCODE_CHARS, USUAL_TOKEN_BYTES * (max_tokens - writer.count))
        )

    for batch in piece_batches(pieces_with_progress(source, "tokenizing", progress), batch_chars):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        raw = [piece.text.encode() for piece in batch]
        mismatched = [n for n, ids in enumerate(encoded) if int(by_id[ids].sum()) != len(raw[n])]
        sizes = dict(zip(mismatched, tokenizer.covered_bytes([batch[n].text for n in mismatched]), strict=True))
        for number, (piece, ids) in enumerate(zip(batch, encoded, strict=True)):
            if starts:
                writer.add(tokenizer.prefix_ids)
            left = len(ids) if max_tokens is None else max(0, max_tokens - writer.count - len(tokenizer.suffix_ids))
            covered = sizes.get(number)
            writer.add(ids[:left], None if covered is None else covered[:left])
            content.update(raw[number])
            is_full = max_tokens is not None and len(ids) >= left
            starts = piece.ends_document or is_full
            if starts:
                writer.add(tokenizer.suffix_ids)
                writer.end_document(int.from_bytes(content.digest(), "little"))
                content = hashlib.blake2b(digest_size=8)
            if is_full:
                return


def piece_batches(stream: Iterable[Piece], batch_chars: Callable[[], int]) -> Iterator[list[Piece]]:
    """Yields pieces in batches of at least `batch_chars()` characters, except the last one."""
    batch: list[Piece] = []
    size = 0
    for piece in stream:
        batch.append(piece)
        size += len(piece.text)
        if size >= batch_chars():
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pieces_with_progress(source: Source, activity: str, progress: ReportProgress) -> Iterator[Piece]:
    """Yields the pieces of a source, reporting the progress of `activity`."""
    return _reported(source.read(), lambda piece: len(piece.text), source, activity, progress)


def rows_with_progress(source: Source, progress: ReportProgress) -> Iterator[SourceRow]:
    """Yields the rows of a source, reporting the progress of "tokenizing"."""
    return _reported(source.rows(), lambda row: len(str(row.value)), source, "tokenizing", progress)


def _reported(
    items: Iterator[T], size: Callable[[T], int], source: Source, activity: str, progress: ReportProgress
) -> Iterator[T]:
    done = 0
    for item in items:
        done += size(item)
        progress(activity, done, max(done, source.size_bytes))
        yield item


def _first(texts: Iterator[str], characters: int | None) -> Iterator[str]:
    """Yields texts until they have this number of characters, or all if it is None."""
    seen = 0
    for text in texts:
        yield text
        seen += len(text)
        if characters is not None and seen >= characters:
            return


def _sample(source: Source, limit: int, max_tokens: int | None, progress: ReportProgress) -> Iterator[str]:
    """Yields about `limit` bytes of text from pieces that are evenly spread over what `max_tokens` allows."""
    size = source.size_bytes
    if max_tokens is not None:
        size = min(size or sys.maxsize, max_tokens * USUAL_TOKEN_BYTES)
    keep = min(1.0, limit / size) if size else 1.0
    seen = taken = 0
    for piece in pieces_with_progress(source, "training the tokenizer", progress):
        seen += len(piece.text)
        if taken <= seen * keep:
            taken += len(piece.text)
            yield piece.text
        if taken >= limit or (max_tokens is not None and seen >= size):
            return


def cache_key(*parts: object) -> str:
    """Returns a hash of `parts`, all inputs of a cached artifact, and of the format version."""
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:32]


def lock_of(folder: Path) -> Path:
    """Returns the file that is locked while a cached folder is built."""
    return folder.with_name(folder.name + ".lock")


def cached(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, calling `build` first if it is missing. One process builds it while others wait."""
    if folder.is_dir():
        return folder
    try:
        make_folder(folder.parent, PRIVATE_MODE)
        with FileLock(lock_of(folder)):
            if not folder.is_dir():
                with atomic_folder(folder) as partial:
                    build(partial)
    except OSError as error:
        raise ConfigError(
            f"the cache {folder.parent} cannot be written: {error.strerror or error}; "
            "free some space or set data.cache_dir to another folder."
        ) from None
    return folder
