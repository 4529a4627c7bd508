"""Finds the tasks that can learn from a dataset, by trying the forms of all tasks on its first rows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from sansgpu.config import ConfigError, UnreachableError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import counted, truncate
from sansgpu.data.files import read_rows
from sansgpu.data.formats.names import TEXT_SUFFIXES, file_form
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.graphs import FACT_KEYS, has_bare_triples
from sansgpu.data.forms.label_columns import find_label_columns, is_id_column, propose_label_columns
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.rows import ROW_REMEDY, BadRowError, Column, SourceRow, column_names
from sansgpu.data.sources import Source, Sources, open_sources
from sansgpu.data.tables import Columns
from sansgpu.jobs.data.fit import KindFit, fit_of
from sansgpu.tasks.configuration import SCHEMA

GUESSED_ROWS = 50  # rows that are read to guess the task
# If rows are as good for several kinds of rows, the first is taken. Nearly every row is a text, so that comes late.
ORDER = (
    "preferences", "questions", "tagged texts", "conversations", "labeled texts", "text groups", "prompts", "texts",
    "graphs",
)  # fmt: skip


@dataclass(frozen=True)
class TaskFit:
    """A task that can learn from the rows, and the most frequent form of them in its eyes."""

    task: str
    form: str


@dataclass(frozen=True)
class Guess:
    """Tasks that can learn from the rows, the best first, and messages about tasks that nearly can."""

    tasks: list[TaskFit]
    notes: list[str]


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


def fitting_tasks(opened: OpenedData, name: str) -> Guess:
    """Returns the tasks that use most of the columns, the best first. Raises ConfigError if no task reads the rows."""
    fits = list[KindFit]()
    problems: list[ConfigError] = []
    seen: list[SourceRow] = []
    has_no_rows = False
    for kind in (*ORDER, *(kind for kind in FORMS if kind not in ORDER)):
        try:
            first, columns, problem = opened.first_rows(kind)
            first = [row for row in first if row.problem is None] or first  # all tasks leave out what cannot be parsed
            sample = list(islice(FORMS[kind].single_rows(first), GUESSED_ROWS))
            note: str | None = None
            if kind == "labeled texts":
                columns, note = find_label_columns(partial(iter, sample), columns, name, is_guess=True)
        except UnreachableError:  # every other kind of rows would wait for the Hub again
            raise
        except ConfigError as error:
            problems.append(error)
            continue
        problems += [problem] if problem else []
        seen = sample or seen
        if sample:
            fit = fit_of(kind, sample, columns)
            fits.append(replace(fit, is_certain=fit.is_certain and note is None))
        else:
            has_no_rows |= problem is None
    best = sorted((fit for fit in fits if fit.is_good), key=lambda fit: fit.quality)  # equal ones stay in order
    nearly = [fit for fit in fits if fit.is_nearly_good and not (best and fit.unused >= best[0].unused)]
    if not best and not seen and has_no_rows:
        raise ConfigError(f"{name} has no rows; add some.")
    partly = [fit for fit in (nearly if best else fits) if fit.valid and not fit.is_good]
    if partly:
        fit = max(partly, key=lambda fit: fit.valid)
        raise ConfigError(
            f"{name} fits task {_tasks_of(fit.kind)[0]} best, but only {fit.valid:,} of the first "
            f"{counted(fit.rows, 'row')} are valid for it; fix the others, or choose a task with --task: {fit.problem}"
        )
    if not best:
        raise _nothing_fits(name, seen, problems, nearly)
    chosen = [fit for fit in best if fit.unused == best[0].unused]
    tasks = [TaskFit(task, fit.form) for fit in chosen for task in _tasks_of(fit.kind)]
    return Guess(tasks, _notes(tasks, seen, nearly))


def _tasks_of(kind: str) -> list[str]:
    return [task for task, settings in SCHEMA.tasks.tasks.items() if settings.rows == kind]


def _notes(tasks: list[TaskFit], sample: list[SourceRow], nearly: list[KindFit]) -> list[str]:
    """Returns messages about tasks that would read the rows with other settings or without their mistakes."""
    if nearly:
        reason = str(nearly[0].problem).removesuffix(ROW_REMEDY)
        return [f"the columns fit task {_tasks_of(nearly[0].kind)[0]} better, but no row is valid for it: {reason}"]
    rows = [row.value for row in sample if isinstance(row.value, dict)]
    proposed = propose_label_columns(rows) if "classify" not in (fit.task for fit in tasks) else None
    return [f"if the rows are texts with labels, add {_classify_with(*proposed)}"] if proposed else []


def _classify_with(text: Column | None, label: Column) -> str:
    """Returns the options for task classify with columns of unusual names."""
    columns = {"text_column": text, "label_column": label}
    set_columns = (f" --set {shlex.quote(f'data.{key}={name}')}" for key, name in columns.items() if name is not None)
    return f"--task classify{''.join(set_columns)}"


def _nothing_fits(
    name: str, sample: list[SourceRow], problems: list[ConfigError], nearly: list[KindFit]
) -> ConfigError:
    """Returns the error about rows that no task reads, with the reason that helps most."""
    if nearly:
        return ConfigError(
            f"{name}: the rows have the columns of task {_tasks_of(nearly[0].kind)[0]}, but none of the first "
            f"{counted(nearly[0].rows, 'row')} is valid for it: {nearly[0].problem}"
        )
    rows = [row.value for row in sample if isinstance(row.value, dict)]
    if rows:
        proposed = propose_label_columns(rows)
        texts = [column for column, value in rows[0].items() if isinstance(value, str) and not is_id_column(column)]
        ways = ["choose one with --task to see what its rows lack"]
        if len(texts) == 2 and proposed is None:
            ways.append(
                f"rename {truncate(str(texts[0]))} to prompt and {truncate(str(texts[1]))} to completion for task "
                "sft if they are questions with answers"
            )
        labels = _classify_with(*(proposed or ("NAME", "NAME")))
        ways.append(f"add {labels} if they are texts with labels")
        return ConfigError(
            f"{name}: no task reads rows with {column_names(rows[0])}; {', '.join(ways[:-1])}, or {ways[-1]}."
        )
    if problems:
        return problems[0]
    if not sample:
        return ConfigError(f"{name} has no rows; add some.")
    what = f"{sample[0].where} is of type {type(sample[0].value).__name__} instead of an object with columns"
    return ConfigError(sample[0].problem or f"{what}; choose a task with --task to see what its rows need.")
