"""A teacher's predictions for a corpus: the folder that `sansgpu distill` writes and training reads.

The folder has the tokenizer's files, the tokens of the corpus as arrays (`NAME.npy`), the predictions for its training
split as shards (`shard-00000.bin`, one record per target token), and `MANIFEST.json` with the SHA-256 of each file. The
manifest is replaced after each shard, so a killed process loses one shard at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sansgpu.config import ConfigError
from sansgpu.config.wording import first_line, shown
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.data.sequences import PackedSequences
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import atomic_folder, atomic_write, write_text
from sansgpu.files.reading import read_object
from sansgpu.machine.disk import file_sha256

B = TypeVar("B", Batch, PackedSequences)
MANIFEST = "MANIFEST.json"
FORMAT = 2  # version of the folder's format; in version 1, records have no `target_log_probability`
MAX_NAME = 255  # maximum bytes of a file name
MAX_WIDTH = 1 << 24  # maximum tokens of a vocabulary or an example; more than any model has
OF_TARGET = "target_log_probability"  # field of a record
SHARD_RECORDS = 1 << 14  # minimum records per shard; they take a teacher minutes to compute
REMEDY = "run `sansgpu distill` again with the same arguments"


def record_type(top_k: int, vocabulary: int, version: int = FORMAT) -> np.dtype[Any]:
    """Returns the dtype of one record, the teacher's prediction for one token.

    `ids` are the `top_k` most likely tokens; `log_probabilities` are theirs, followed by that of all other tokens
    together. `target_log_probability` is that of the token in the text.
    """
    likely: list[Any] = [
        ("ids", "<u2" if vocabulary <= 1 << 16 else "<u4", (top_k,)),
        ("log_probabilities", "<f2", (top_k + 1,)),
    ]
    return np.dtype([*(likely if top_k else []), *([(OF_TARGET, "<f2")] if version > 1 else [])])


@dataclass(frozen=True)
class TeacherFolder:
    """An opened folder with a teacher's predictions, which may be incomplete.

    `settings` identify the teacher, the corpus and the options of `sansgpu distill`. `counts` are the numbers of
    predicted tokens in each of the E training examples.
    """

    root: Path
    settings: dict[str, Any]
    files: dict[str, str]  # file name -> SHA-256, without the shards
    shards: dict[str, str]  # file name -> SHA-256 of each complete shard
    counts: np.ndarray  # (E,) int64
    version: int = FORMAT

    @property
    def record(self) -> np.dtype[Any]:
        return record_type(self.settings["top_k"], self.settings["vocab_size"], self.version)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a record."""
        return self.record.names or ()

    @property
    def fingerprint(self) -> str:
        """Identifies the predictions: the start of the manifest's SHA-256."""
        return file_sha256(self.root / MANIFEST)[:16]

    def array(self, name: str) -> np.ndarray:
        try:
            found: np.ndarray = np.load(self.root / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:  # EOFError: the file is empty
            raise ConfigError(
                f"{self.root / name}.npy cannot be read ({first_line(error)}); delete {self.root} and {REMEDY}."
            ) from None
        return found

    def shard_examples(self) -> list[tuple[int, int]]:
        """Returns the range [first, stop) of training examples for each shard."""
        offsets = np.concatenate([[0], np.cumsum(self.counts)])
        ranges, first = [], 0
        while first < len(self.counts):
            stop = int(np.searchsorted(offsets, offsets[first] + SHARD_RECORDS))
            ranges.append((first, min(max(stop, first + 1), len(self.counts))))
            first = ranges[-1][1]
        return ranges

    def write_shard(self, number: int, records: np.ndarray) -> TeacherFolder:
        """Writes a shard and then the manifest. Raises OSError if a file cannot be written."""
        path = self.root / shard_name(number)
        with atomic_write(path) as partial:
            records.tofile(partial)
        done = replace(self, shards={**self.shards, path.name: file_sha256(path)})
        write_text(self.root / MANIFEST, _manifest(done.settings, done.files, done.shards, self.version))
        return done

    def has_shard(self, number: int) -> bool:
        """Returns whether a shard is complete and its SHA-256 is the one in the manifest."""
        name = shard_name(number)
        return name in self.shards and _is_intact(self.root / name, self.shards[name])


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def is_teacher_folder(root: Path) -> bool:
    return (root / MANIFEST).is_file()


def create_teacher_folder(
    root: Path,
    settings: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    save_tokenizer: Callable[[Path], None],
) -> None:
    """Creates a folder without any shards yet. `arrays` must include `counts`. Raises OSError if writing fails."""
    if root.is_dir():
        root.rmdir()  # the folder is empty
    with atomic_folder(root) as partial:
        save_tokenizer(partial)
        for name, values in arrays.items():
            np.save(partial / f"{name}.npy", values)
        files = {path.name: file_sha256(path) for path in sorted(partial.iterdir()) if path.is_file()}
        (partial / MANIFEST).write_text(_manifest(dict(settings), files, {}), encoding="utf-8")


def open_teacher_folder(root: Path) -> TeacherFolder:
    """Opens a folder, possibly with missing shards. Raises ConfigError if it is not one, or a file was changed."""
    if not is_teacher_folder(root):
        what = "it has no MANIFEST.json" if root.is_dir() else "it does not exist"
        raise ConfigError(
            f"{root} is not a folder written by `sansgpu distill`: {what}; pass the --output of that command."
        )
    manifest = read_object(root / MANIFEST)
    settings, files, shards = (manifest.get(key) for key in ("settings", "files", "shards"))
    version = manifest.get("format")
    if version not in (1, FORMAT) or not all(isinstance(part, dict) for part in (settings, files, shards)):
        raise ConfigError(
            f"{root / MANIFEST} was not written by this version of `sansgpu distill`; delete {root} and {REMEDY}."
        )
    assert isinstance(settings, dict)
    assert isinstance(files, dict)
    if (wrong := _wrong_setting(settings, version)) is not None:
        raise ConfigError(f"{root / MANIFEST}: {wrong} is {shown(settings.get(wrong))}; delete {root} and {REMEDY}.")
    for name, sha256 in files.items():
        if name != Path(name).name or len(name) > MAX_NAME:
            raise ConfigError(
                f"{root / MANIFEST} names the file {shown(name)}, which is not in its folder; delete {root} and "
                f"{REMEDY}."
            )
        if not _is_intact(root / name, sha256):
            raise ConfigError(f"{root / name} is missing or was changed; delete {root} and {REMEDY}.")
    folder = TeacherFolder(root, settings, files, shards or {}, np.zeros(0, np.int64), version)
    counts = np.array(folder.array("counts"))
    if counts.ndim != 1 or counts.dtype != np.int64 or (counts < 0).any():
        raise ConfigError(f"{root / 'counts.npy'} does not contain token counts; delete {root} and {REMEDY}.")
    return replace(folder, counts=counts)


def _wrong_setting(settings: dict[str, Any], version: int) -> str | None:
    """Returns the name of a setting with a type or value that `sansgpu distill` never writes, or None."""
    for name in ("task", "teacher", "data", "weights", "corpus", "vocabulary", "precision"):
        if not isinstance(settings.get(name), str):
            return name
    for name, least in (("vocab_size", 2), ("max_length", 2), ("top_k", 0 if version > 1 else 1)):
        if type(settings.get(name)) is not int or not least <= settings[name] <= MAX_WIDTH:
            return name
    return "top_k" if settings["top_k"] >= settings["vocab_size"] else None


class Predictions:
    """Reads the predictions for training examples from the shards of a folder when a batch needs them."""

    def __init__(self, folder: TeacherFolder, progress: ReportProgress) -> None:
        """Checks all shards. Raises ConfigError if one is missing or was changed."""
        self._record, self._fields = folder.record, folder.fields
        # Records are numbered over all shards: `_offsets` has the first number of each example, `_starts` of a shard.
        self._offsets = np.concatenate([[0], np.cumsum(folder.counts)])
        ranges = folder.shard_examples()
        self._starts = np.array([self._offsets[first] for first, _ in ranges])
        self._paths = [folder.root / shard_name(number) for number in range(len(ranges))]
        for number, path in enumerate(self._paths):
            progress("checking the teacher's predictions", number, len(ranges), "shard")
            if path.name not in folder.shards:
                raise ConfigError(f"{folder.root} is incomplete: {path.name} is missing; {REMEDY}.")
            if not folder.has_shard(number):
                raise ConfigError(f"{path} is missing or was changed; {REMEDY}.")

    def add_to(self, batch: B, examples: np.ndarray) -> B:
        """Returns `batch`, which holds these examples, with the predictions for its targets."""
        records: np.ndarray = np.concatenate(
            [np.zeros(0, self._record), *(self._read(int(example)) for example in examples)]
        )
        has_target: np.ndarray = batch.targets.numpy() != IGNORE

        def of_tokens(name: str, dtype: type[np.generic]) -> torch.Tensor | None:
            if name not in self._fields:
                return None
            values = np.zeros((*has_target.shape, *records[name].shape[1:]), dtype)
            values[has_target] = records[name]
            return torch.from_numpy(values)

        return replace(
            batch,
            teacher_ids=of_tokens("ids", np.int32),
            teacher_log_probabilities=of_tokens("log_probabilities", np.float16),
            teacher_target_log_probabilities=of_tokens(OF_TARGET, np.float16),
        )

    def _read(self, example: int) -> np.ndarray:
        """Reads the records of an example. A memory map would do, but its pages count as memory of the process."""
        first, stop = (int(offset) for offset in self._offsets[example : example + 2])
        shard = int(np.searchsorted(self._starts, first, side="right")) - 1
        if first == stop:
            return np.zeros(0, self._record)
        skipped = (first - int(self._starts[shard])) * self._record.itemsize
        return np.fromfile(self._paths[shard], self._record, stop - first, offset=skipped)


def _is_intact(path: Path, sha256: object) -> bool:
    return path.is_file() and file_sha256(path) == sha256


def _manifest(settings: dict[str, Any], files: dict[str, str], shards: dict[str, str], version: int = FORMAT) -> str:
    return json.dumps({"format": version, "settings": settings, "files": files, "shards": shards}, indent=1) + "\n"
