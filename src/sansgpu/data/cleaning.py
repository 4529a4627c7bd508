"""Limits the text of a source, and leaves documents out of it, before it is tokenized and split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.data.duplicates import BANDS, MIN_SIMILARITY, SHINGLE_WORDS, DocumentHashes, hash_documents
from sansgpu.data.files import Piece
from sansgpu.data.shards import cache_key, cached, pieces_with_progress
from sansgpu.data.sources import Source
from sansgpu.events.progress import ReportProgress

GIGABYTE = 10**9
ARRAY = "documents.npy"  # file of the cache with a value for each document


def first_bytes(source: Source, gigabytes: float) -> Source:
    """Returns a source with the first gigabytes of UTF-8 text. The last document may be cut."""
    limit = max(1, round(gigabytes * GIGABYTE))

    def read() -> Iterator[Piece]:
        left, starts = limit, True
        for piece in source.read():
            encoded = piece.text.encode()
            if len(encoded) >= left:
                text = encoded[:left].decode(errors="ignore")  # without the character that is cut
                if text or not starts:
                    yield Piece(text, True)
                return
            left, starts = left - len(encoded), piece.ends_document
            yield piece

    size = min(source.size_bytes or limit, limit)
    return replace(source, fingerprint=_fingerprint(source, limit), size_bytes=size, read=read)


def chosen_documents(source: Source, chosen: np.ndarray) -> Source:
    """Returns a source with the documents for which `chosen`, (D,) bool, is True."""
    if chosen.all():
        return source

    def read() -> Iterator[Piece]:
        number = 0
        for piece in source.read():
            if chosen[number]:
                yield piece
            number += piece.ends_document

    fingerprint = _fingerprint(source, np.packbits(chosen).tobytes())
    size = round(source.size_bytes * float(chosen.mean()))
    return replace(source, fingerprint=fingerprint, size_bytes=size, read=read)


def _fingerprint(source: Source, change: object) -> str:
    return hashlib.sha256(repr((source.fingerprint, change)).encode()).hexdigest()


def without_duplicates(
    source: Source, held: Source | None, kind: Literal["exact", "near"], cache: Path, progress: ReportProgress
) -> tuple[Source, str]:
    """Leaves out documents that repeat an earlier one, or one of the validation data `held`. Also returns a message.

    Which documents repeat others is found once and cached.
    """
    settings = (kind,) if kind == "exact" else (kind, SHINGLE_WORDS, BANDS, MIN_SIMILARITY)
    key = cache_key("duplicates", source.fingerprint, held and held.fingerprint, *settings)

    def hashed(part: Source) -> DocumentHashes:
        return hash_documents(pieces_with_progress(part, "finding duplicates", progress), kind == "near")

    def choose() -> np.ndarray:
        if held is None:
            return hashed(source).are_first()
        before = hashed(held)
        return before.followed_by(hashed(source)).are_first()[len(before) :]

    chosen = cached_array(cache / "duplicates" / key, choose)
    if held is not None and not chosen.any():
        raise ConfigError(
            f"data.deduplicate leaves out all documents of {source.name}, because they repeat those of {held.name}; "
            "choose another data.validation_name."
        )
    left_out = len(chosen) - int(chosen.sum())
    note = f"data.deduplicate {kind}: {left_out:,} of {counted(len(chosen), 'document')} left out"
    return chosen_documents(source, chosen), note


def cached_array(folder: Path, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the array in a folder of the cache; if it is missing, calls `compute` for it. Raises ConfigError."""

    def build(partial: Path) -> None:
        np.save(partial / ARRAY, compute())

    return read_array(cached(folder, build) / ARRAY)


def read_array(file: Path) -> np.ndarray:
    """Reads an array of the cache. Raises ConfigError if the file is damaged."""
    try:
        found: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise ConfigError(f"{file} is damaged; delete its folder to create it again.") from None
    return found
