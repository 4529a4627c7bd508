"""Measures a dataset by its first rows, so that a large one takes no longer than a small one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sansgpu.config import ConfigError, Override, change_config
from sansgpu.config.paths import BUILT_IN_NAMES
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.data.formats.names import TABLES, file_form
from sansgpu.data.formats.opening import is_compressed
from sansgpu.data.forms.label_columns import find_label_columns
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.canonical import canonical_row
from sansgpu.data.preview.example import text_in
from sansgpu.data.preview.row_types import parts_of
from sansgpu.data.rows import BadRowError, SourceRow
from sansgpu.data.sources import BYTES_PER_TOKEN, Source
from sansgpu.data.tables import Columns
from sansgpu.events.progress import ReportProgress
from sansgpu.jobs.data import NO_MODEL, guess_tasks
from sansgpu.jobs.data.guess import OpenedData, has_documents, rows_of
from sansgpu.tasks.configuration import DEFAULT_TASK, SCHEMA, as_config

MAX_ROWS, MAX_BYTES = 10_000, 10e6  # read at most this many rows, of this many bytes
SAMPLED_ROWS = 200  # at most twice as many rows, evenly spaced, are kept
COMPRESSION_RATIO = 3.0  # assumed bytes of a text / its bytes in a compressed file


@dataclass(frozen=True)
class DataSample:
    """The size of a training split, and rows of it in the canonical form of their task."""

    kind: str  # the kind of the rows, a key of FORMS
    form: str  # columns of most rows; empty for texts without columns
    rows: int  # documents, for texts without columns
    text_bytes: float
    is_exact: bool  # False if the size is estimated from the first rows
    has_validation: bool  # the dataset has a validation part of its own
    values: tuple[Any, ...] = ()

    def describe(self) -> str:
        """Returns e.g. "conversations: messages (1,203 rows, about 310,000 tokens)"."""
        noun = "row" if self.form else "document"
        number = counted(self.rows, noun) if self.is_exact else f"about {_round(self.rows):,} {noun}s"
        tokens = _round(max(1, self.text_bytes / BYTES_PER_TOKEN))
        form = f": {self.form}" if self.form and self.form != self.kind else ""
        return f"{self.kind}{form} ({number}, about {tokens:,} tokens)"


def _round(number: float) -> int:
    """Rounds to two digits."""
    return int(float(f"{number:.1e}"))


def sample_rows(config: Config, progress: ReportProgress) -> DataSample:
    """Reads the first rows of the training data of `config`. Raises ConfigError if the data cannot be read."""
    kind = config.settings.rows
    progress("reading rows", 0, 0)
    sources, data, _ = OpenedData(config.data).open(kind)
    source, has_validation = sources.train, sources.validation is not None
    if has_documents(source, kind):
        return DataSample(kind, "", max(1, len(source.files)), _uncompressed_bytes(source), True, has_validation)
    beginning = _Beginning(rows_of(source, kind, Columns.of(data)), _has_names(source))
    counts, text_bytes, values, every = Counter[str](), 0, list[tuple[int, Any]](), 1
    forms, columns = FORMS[kind], Columns.of(data)
    if kind == "labeled texts":
        columns, _ = find_label_columns(source.rows, columns, source.name)
    for number, row in enumerate(forms.single_rows(beginning)):
        try:
            typed = forms.read(row, columns)
        except BadRowError:
            continue
        form = forms.form_of(row.value, columns) if isinstance(row.value, dict) else None
        counts[form.name if form else kind] += 1
        text_bytes += len(text_in(parts_of(typed)).encode(errors="replace"))
        if number % every == 0:
            values.append((number, canonical_row(forms, row, typed)))
        if len(values) > 2 * SAMPLED_ROWS:
            every *= 2
            values = [one for one in values if one[0] % every == 0]
    scale = 1.0 if beginning.is_whole else _rows_in(source, beginning) / beginning.rows
    rows = round(counts.total() * scale)
    form_name = counts.most_common(1)[0][0] if counts else kind
    kept = tuple(value for _, value in values)
    return DataSample(kind, form_name, rows, text_bytes * scale, beginning.is_whole, has_validation, kept)


def reading_config(text: str, task: str, overrides: Sequence[Override] = ()) -> Config:
    """Returns a configuration that suffices to read the rows of a dataset. Raises ConfigError."""
    model = {"name_or_path": NO_MODEL} if SCHEMA.tasks.tasks[task].fine_tunes else {}
    return change_config(as_config({"task": task, "model": model, "data": {"dataset_name": text}}), overrides)


def recognize(text: str, tasks: Collection[str], progress: ReportProgress) -> tuple[str, DataSample]:
    """Returns the one of `tasks` that fits the first rows of the data best, and a sample of them.

    Raises ConfigError if the data cannot be read, or fit none of the tasks.
    """
    progress("reading rows", 0, 0)
    is_built_in = text in BUILT_IN_NAMES
    task = DEFAULT_TASK if is_built_in else next((fit.task for fit in guess_tasks(text) if fit.task in tasks), None)
    if task is None:
        raise ConfigError(f"the rows of {text} are for none of the tasks {', '.join(tasks)}.")
    return task, sample_rows(reading_config(text, task), progress)


class _Beginning:
    """Iterates over rows until `MAX_ROWS` or `MAX_BYTES` and measures them."""

    def __init__(self, rows: Iterable[SourceRow], has_names: bool) -> None:
        self._iterator, self._has_names = rows, has_names
        self.rows, self.bytes, self.is_whole = 0, 0, True

    def __iter__(self) -> Iterator[SourceRow]:
        for row in self._iterator:
            if self.rows == MAX_ROWS or self.bytes > MAX_BYTES:
                self.is_whole = False
                return
            self.rows += 1
            self.bytes += self._size(row.value)
            yield row

    def _size(self, value: Any) -> int:
        """Estimates the bytes of a row in its file: as JSON, or of the cells with a separator after each."""
        if isinstance(value, dict) and not self._has_names:
            cells = (cell for part in value.values() for cell in (part if isinstance(part, list) else [part]))
            return sum(len(str(cell).encode(errors="replace")) + 1 for cell in cells)
        return len(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace")) + 1


def _has_names(source: Source) -> bool:
    """Returns whether each row in the files of a source repeats the names of its columns."""
    return not any(file_form(path) in (*TABLES, ".conll") for path in source.files.values())


def _rows_in(source: Source, beginning: _Beginning) -> float:
    """Returns the number of rows of a source that is larger than the beginning that was read."""
    if source.row_count:
        return source.row_count
    return max(beginning.rows, _uncompressed_bytes(source) / max(1, beginning.bytes) * beginning.rows)


def _uncompressed_bytes(source: Source) -> float:
    packed = any(is_compressed(path) or file_form(path) == ".parquet" for path in source.files.values())
    return source.size_bytes * (COMPRESSION_RATIO if packed else 1.0)
