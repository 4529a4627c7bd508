"""Finds the tasks that can learn from a dataset, by trying the forms of all tasks on its first rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sansgpu.config import ConfigError, UnreachableError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import counted
from sansgpu.data.files import read_rows
from sansgpu.data.formats.names import TEXT_SUFFIXES, file_form
from sansgpu.data.forms.form import Form, Forms, resolve_columns
from sansgpu.data.forms.graphs import FACT_KEYS, has_bare_triples
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.rows import BadRowError, SourceRow, column_names
from sansgpu.data.sources import Source, Sources, open_sources
from sansgpu.data.tables import Columns
from sansgpu.tasks.configuration import SCHEMA

GUESSED_ROWS = 50  # rows that are read to guess the task
MIN_VALID = 0.5  # share of them that must be valid rows of a task
# If rows are as good for several kinds of rows, the first is taken. Nearly every row is a text, so that comes late.
ORDER = (
    "preferences", "questions", "tagged texts", "conversations", "labeled texts", "text groups", "prompts", "texts",
    "graphs",
)  # fmt: skip
_NAMES_OF_ROWS = {"id", "_id", "idx", "uuid"}  # columns that no task needs to use
_TEXT = ("text",)


@dataclass(frozen=True)
class TaskFit:
    """A task that can learn from the rows, and the most frequent form of them in its eyes."""

    task: str
    form: str


class OpenedData:
    """Opens the sources of a dataset for each kind of rows. Reads every file once to do so, if settings are equal."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._opened: list[tuple[DataConfig, bool, Sources]] = []
        self._first: dict[tuple[int, str], tuple[list[SourceRow], ConfigError | None]] = {}

    def open(self, kind: str) -> tuple[Sources, DataConfig, str | None]:
        """Returns the sources, the settings with the columns of tables without a header, and a message about them."""
        forms = FORMS[kind]
        data, note = resolve_columns(self._data, forms)
        for known, has_text_rows, sources in self._opened:
            if known == data and has_text_rows == forms.text_rows:
                return sources, data, note
        sources = open_sources(data, forms.text_rows)
        self._opened.append((data, forms.text_rows, sources))
        return sources, data, note

    def first_rows(self, kind: str) -> tuple[list[SourceRow], Columns, ConfigError | None]:
        """Returns the first rows of the training data, the columns, and the error that ended reading earlier, if any.

        The rows are read once for all kinds of rows that see the same, because a .json file is parsed as a whole.
        """
        sources, data, _ = self.open(kind)
        columns = Columns.of(data)
        source = sources.train
        has_only_documents = has_documents(source, kind) and not _has_row_files(source)
        is_special = has_only_documents or _has_triples(source, kind, columns)
        key = id(sources), kind if is_special else ""
        if key not in self._first:
            rows, problem = list[SourceRow](), None
            try:
                for row in islice(rows_of(source, kind, columns) if is_special else source.rows(), GUESSED_ROWS):
                    rows.append(row)
            except ConfigError as error:  # the rows before the damaged one are used
                problem = error
            self._first[key] = rows, problem
        return self._first[key][0], columns, self._first[key][1]


def rows_of(source: Source, kind: str, columns: Columns) -> Iterator[SourceRow]:
    """Yields the rows of a source, as the tasks that read this kind of rows see them."""
    if has_documents(source, kind):
        yield from _documents(source)
    elif _has_triples(source, kind, columns):
        for path in source.files.values():
            yield from read_rows(path, FACT_KEYS if has_bare_triples(path, columns) else True)
    else:
        yield from source.rows()


def _has_triples(source: Source, kind: str, columns: Columns) -> bool:
    """Returns whether a graph has tables without a header whose lines are triples."""
    return kind == "graphs" and any(has_bare_triples(path, columns) for path in source.files.values())


def has_documents(source: Source, kind: str) -> bool:
    """Returns whether a source of texts has files without rows, such as plain text."""
    one_of_each_suffix = {file_form(path): path for path in source.files.values()}
    return kind == "texts" and not all(map(_has_rows, one_of_each_suffix.values()))


def _has_row_files(source: Source) -> bool:
    return any(file_form(path) not in TEXT_SUFFIXES for path in source.files.values())


def _has_rows(path: Path) -> bool:
    try:
        next(read_rows(path), None)
    except BadRowError:
        return True
    except ConfigError:  # text, or a damaged file: reading it as text raises the same error
        return False
    return True


def _documents(source: Source) -> Iterator[SourceRow]:
    texts, number = list[str](), 1
    for piece in source.read():
        texts.append(piece.text)
        if piece.ends_document:
            yield SourceRow(f"{source.name}, document {number}", {"text": "".join(texts)})
            texts, number = [], number + 1


def fitting_tasks(opened: OpenedData, name: str) -> list[TaskFit]:
    """Returns the tasks that use most of the columns, the best first. Raises ConfigError if no task reads the rows."""
    found: list[tuple[tuple[Any, ...], list[TaskFit]]] = []
    problems: list[ConfigError] = []
    seen: list[SourceRow] = []
    has_no_rows = False
    closest: tuple[str, _Fit] | None = None  # the kind of rows of which most are valid, if none has enough
    for place, kind in enumerate((*ORDER, *(kind for kind in FORMS if kind not in ORDER))):
        try:
            first, columns, problem = opened.first_rows(kind)
            sample = list(islice(FORMS[kind].single_rows(first), GUESSED_ROWS))
        except UnreachableError:  # every other kind of rows would wait for the Hub again
            raise
        except ConfigError as error:
            problems.append(error)
            continue
        problems += [problem] if problem else []
        seen = sample or seen
        if not sample:
            has_no_rows |= problem is None
            continue
        fit = _fit(FORMS[kind], sample, columns)
        if fit.is_good:
            found.append(((*fit.quality, place), [TaskFit(task, fit.form) for task in _tasks_of(kind)]))
        elif fit.valid and (closest is None or fit.valid > closest[1].valid):
            closest = kind, fit
    if not found and not seen and has_no_rows:
        raise ConfigError(f"{name} has no rows; add some.")
    if not found:
        raise _nothing_fits(name, seen, problems, closest)
    found.sort(key=lambda one: one[0])
    fewest_unused = found[0][0][0]
    return [fit for quality, fits in found if quality[0] == fewest_unused for fit in fits]


def _tasks_of(kind: str) -> list[str]:
    return [task for task, settings in SCHEMA.tasks.tasks.items() if settings.rows == kind]


class _Fit(NamedTuple):
    """How well forms fit rows, with less for better in `quality`, and the form of the first valid row.

    The quality is measured by the columns that are not used, then by columns of the form that are missing, then by
    invalid rows.
    """

    rows: int
    valid: int
    quality: tuple[float, float, float]
    form: str
    problem: str | None  # what is wrong with the first invalid row

    @property
    def is_good(self) -> bool:
        return self.valid >= max(1, MIN_VALID * self.rows)


def _fit(forms: Forms[Any], sample: list[SourceRow], columns: Columns) -> _Fit:
    unused, missing, valid, name = 0, 0, 0, ""
    problem: str | None = None
    for row in sample:
        try:
            forms.read(row, columns)
        except BadRowError as error:
            problem = problem or str(error)
            continue
        valid += 1
        if (form := forms.form_of(row.value, columns)) is not None and isinstance(row.value, dict):
            named = row._replace(value=forms.with_usual_names(row.value, columns))
            unused += len({*form.unused_parts(named.value, columns)} - _NAMES_OF_ROWS)
            missing += _is_incomplete(form, named, forms)
            name = name or form.name
    share = max(1, valid)
    return _Fit(
        len(sample), valid, (round(unused / share, 1), round(missing / share, 1), -valid / len(sample)), name, problem
    )


def _is_incomplete(form: Form[Any], row: SourceRow, forms: Forms[Any]) -> bool:
    """Returns whether a form took a row that lacks its columns, or a plain text although others are its usual rows."""
    lacks = any(row.value.get(key) is None for key in form.keys)
    return forms is not FORMS["texts"] and (lacks or form.keys == _TEXT)


def _nothing_fits(
    name: str, sample: list[SourceRow], problems: list[ConfigError], closest: tuple[str, _Fit] | None
) -> ConfigError:
    """Returns the error about rows that no task reads, with the reason that helps most."""
    if closest is not None:
        kind, fit = closest
        return ConfigError(
            f"{name}: only {fit.valid:,} of the first {counted(fit.rows, 'row')} are valid for a task; as "
            f"{_tasks_of(kind)[0]}: {fit.problem}"
        )
    first = next((row.value for row in sample if isinstance(row.value, dict)), None)
    if first is not None:
        return ConfigError(
            f"{name}: no task reads rows with {column_names(first)}; choose one with --task to see what its rows lack, "
            "or name the columns with --set data.text_column=NAME and --set data.label_column=NAME."
        )
    if problems:
        return problems[0]
    if not sample:
        return ConfigError(f"{name} has no rows; add some.")
    what = f"{sample[0].where} is of type {type(sample[0].value).__name__} instead of an object with columns"
    return ConfigError(sample[0].problem or f"{what}; choose a task with --task to see what its rows need.")
