"""A search index of the passages of files by meaning, stored in a folder of the cache.

The passages of each file (JSON lines) and their embeddings (.npy) are stored under a hash of the file's content, so
that only changed files are embedded again. S passages, D width of an embedding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.plain_data import unreadable
from sansgpu.data.documents.collection import Collection
from sansgpu.data.documents.formats import readers
from sansgpu.data.formats.opening import sha256_of
from sansgpu.events.progress import ReportProgress, counting
from sansgpu.files.atomic import atomic_write
from sansgpu.machine.private_folder import make_private, require_own_file
from sansgpu.tasks.embed.passages import Passage, PassageRules

ENCODED_PASSAGES = 1024  # passages that are embedded at a time
EXPANSION = 256  # candidates that a search examines; more give a better recall

# Names of usearch's distances by the names of similarities. Embeddings are normalized only for cosine.
METRICS: dict[str, str] = {"cosine": "cos", "dot": "ip", "euclidean": "l2sq"}

EncodeQueries = Callable[[Sequence[str]], np.ndarray]  # texts -> embeddings (S, D) float32
Encode = Callable[[Sequence[str], Callable[[int], None]], np.ndarray]  # the same, with a progress callback


def require_usearch() -> None:
    """Raises ConfigError if the package usearch is not installed."""
    require("sansgpu search", "usearch")


@dataclass(frozen=True)
class FoundPassage:
    """A passage of a file and its similarity to the query, by default the cosine."""

    file: Path
    passage: Passage
    score: float

    @property
    def place(self) -> str:
        return self.passage.place_in(self.file)

    def as_json(self) -> dict[str, Any]:
        found = self.passage
        return {"file": str(self.file), found.unit: found.number, "score": self.score, "text": found.text}


class PassageIndex:
    """A search index in a private folder, which `open` updates.

    It takes two functions that embed texts, because many models embed queries differently from passages.
    """

    def __init__(
        self,
        folder: Path,
        rules: PassageRules,
        encode: Encode,
        encode_query: EncodeQueries,
        similarity: str = "cosine",  # one of METRICS
    ) -> None:
        make_private(folder)
        self._similarity = similarity
        self._folder, self._rules, self._encode, self._encode_query = folder, rules, encode, encode_query
        self._files: list[tuple[Path, str]] = []  # (file, name of its entry in the folder)
        self._first: list[int] = []  # index of each file's first passage
        self._index: Any = None

    def open(self, files: Sequence[Path], warn: Callable[[str], None], progress: ReportProgress) -> None:
        """Embeds new and changed files, and deletes the entries of files that are not in `files`.

        Skips files that cannot be read, with a warning. Raises ConfigError if no file has a passage.
        """
        with FileLock(self._folder / ".lock"):
            self._files = self._embed_new(files, warn, progress)
            counts = [len(self._vectors(entry)) for _, entry in self._files]
            if not sum(counts):
                raise ConfigError(
                    f"{files[0]} contains no text to search; pass a different file."
                    if len(files) == 1
                    else "the files contain no text to search; pass a different folder."
                )
            self._first = np.cumsum([0, *counts])[:-1].tolist()
            self._index = self._load_index(progress)

    def search(self, query: str, count: int) -> list[FoundPassage]:
        """Returns the `count` passages that are nearest to a query, best first."""
        matches = self._index.search(self._comparable(self._encode_query([query]))[0], count)
        return [
            self._passage(int(key), self._similarity_of(float(distance)))
            for key, distance in zip(matches.keys, matches.distances, strict=True)
        ]

    def _comparable(self, vectors: np.ndarray) -> np.ndarray:
        return _normalized(vectors) if self._similarity == "cosine" else vectors

    def _similarity_of(self, distance: float) -> float:
        """Returns the similarity for a distance of usearch; the negative euclidean one if that is compared."""
        return -math.sqrt(max(distance, 0.0)) if self._similarity == "euclidean" else 1 - distance

    def _embed_new(
        self, files: Sequence[Path], warn: Callable[[str], None], progress: ReportProgress
    ) -> list[tuple[Path, str]]:
        """Writes the entries that are missing. Returns the readable files with the names of their entries."""
        entries = {path: self._entry_of(path) for path in files}
        new: dict[str, list[Passage]] = {}
        collection = Collection()

        def of_command(message: str) -> None:
            warn(message.replace("data.text_column", "--text-column"))

        for path, entry in list(entries.items()):
            if entry in new or self._path(entry, ".npy").exists():
                continue
            progress(f"reading {path.name}", 0, 0)
            passages = self._rules.read_or_skip(path, collection, of_command)
            if passages is None:
                del entries[path]
            else:
                new[entry] = passages
        if not entries and collection.notes():
            raise collection.refusal()
        for note in collection.notes():
            warn(note)
        done, total = 0, sum(map(len, new.values()))
        for group in _groups(new):
            self._write(group, done, total, progress)
            done += sum(map(len, group.values()))
        return list(entries.items())

    def _entry_of(self, path: Path) -> str:
        try:
            content = sha256_of(path)
        except OSError as error:
            raise unreadable(path, error) from None
        form = "".join(path.suffixes[-2:])  # because .txt and .jsonl files with the same content differ in passages
        parts = content, form, self._rules.max_tokens, self._rules.column, *readers([path])
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _write(self, entries: dict[str, list[Passage]], done: int, total: int, progress: ReportProgress) -> None:
        """Embeds the passages of several files, and writes an entry for each file."""
        texts = [passage.text for passages in entries.values() for passage in passages]
        parts = [np.empty((0, 0), np.float32)]
        for first in range(0, len(texts), ENCODED_PASSAGES):
            count = counting(progress, "embedding", done + first, total, "passage")
            parts.append(self._comparable(self._encode(texts[first : first + ENCODED_PASSAGES], count)))
        vectors = np.concatenate(parts[1:] or parts)
        first = 0
        for entry, passages in entries.items():
            with atomic_write(self._path(entry, ".jsonl")) as partial:
                lines = (json.dumps(asdict(passage)) + "\n" for passage in passages)
                partial.write_text("".join(lines), encoding="utf-8")
            with atomic_write(self._path(entry, ".npy")) as partial, partial.open("wb") as file:
                np.save(file, vectors[first : first + len(passages)], allow_pickle=False)
            first += len(passages)

    def _path(self, entry: str, suffix: str) -> Path:
        return self._folder / f"{entry}{suffix}"

    def _vectors(self, entry: str) -> np.ndarray:
        return np.load(self._path(entry, ".npy"), mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

    def _load_index(self, progress: ReportProgress) -> Any:
        """Loads the index of these files, or builds it and deletes the entries and indexes of other files."""
        import usearch
        from usearch.index import Index

        entries = [entry for _, entry in self._files]
        path = self._path(hashlib.sha256(repr((usearch.__version__, entries)).encode()).hexdigest(), ".usearch")
        parts = [vectors for entry in entries if len(vectors := self._vectors(entry))]
        index = Index(ndim=parts[0].shape[1], metric=METRICS[self._similarity], dtype="f32", expansion_search=EXPANSION)
        if path.exists():
            require_own_file(path)
            index.load(path)
            return index
        progress("building the index", 0, 0)
        vectors = np.concatenate(parts)
        index.add(np.arange(len(vectors)), vectors, threads=1)  # more threads would make the index nondeterministic
        with atomic_write(path) as partial:
            index.save(partial)
        kept = {path.name, ".lock", *(f"{entry}{suffix}" for entry in entries for suffix in (".npy", ".jsonl"))}
        for old in self._folder.iterdir():
            if old.name not in kept:
                old.unlink()
        return index

    def _passage(self, number: int, score: float) -> FoundPassage:
        """Returns the passage with this index over all files."""
        place = int(np.searchsorted(self._first, number, side="right")) - 1
        file, entry = self._files[place]
        lines = self._path(entry, ".jsonl").read_text(encoding="utf-8").split("\n")
        return FoundPassage(file, Passage(**json.loads(lines[number - self._first[place]])), score)


def _normalized(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, np.finfo(np.float32).tiny)  # type: ignore[no-any-return]


def _groups(entries: dict[str, list[Passage]]) -> Iterator[dict[str, list[Passage]]]:
    """Yields files in groups, because it is faster to embed many passages together."""
    group: dict[str, list[Passage]] = {}
    for entry, passages in entries.items():
        group[entry] = passages
        if sum(map(len, group.values())) >= ENCODED_PASSAGES:
            yield group
            group = {}
    yield group
