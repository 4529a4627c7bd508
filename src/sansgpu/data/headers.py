"""Finds tables without a header: a first line of data would otherwise be taken for the names of columns.

A first line with one of the names that the task looks for is a header. Any other line is data only if two signs agree:
its label, tag or relation occurs again in another line, and another value cannot be the name of a column. If only some
of this is true, the file is refused with the settings that resolve it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sansgpu.config import SETTINGS, Config, ConfigError, DataConfig
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, conll_columns
from sansgpu.data.files import file_form, read_lines, read_rows
from sansgpu.data.rows import TEXT_NAMES
from sansgpu.data.sources import local_files
from sansgpu.tasks.classify.labels import LABEL_COLUMNS, PAIR_COLUMN
from sansgpu.tasks.embed.rows import PAIR_COLUMNS, SCORE_COLUMNS, TEXT_COLUMNS
from sansgpu.tasks.graph.rows import FACT_KEYS, ROW_KEYS
from sansgpu.tasks.tokens.tagged import TAG_COLUMNS

TABLES = (".csv", ".tsv")
MAX_LINES = 100_000  # lines in which a value of the first line may occur again
MANY_WORDS = 5  # a value with as many words is a text rather than the name of a column
SHOWN_COLUMNS, SHOWN_CHARACTERS = 12, 20  # a message quotes at most these of a first line

TAGGED_FORMS = (*TABLES, ".txt")  # files that may contain CoNLL columns, in addition to .conll
_TAGGED_NAMES = frozenset(("text", "tokens", "spans", *TAG_COLUMNS))


def require_columns(config: Config) -> None:
    """Raises ConfigError if it is unclear what the columns of the configured local tables are."""
    groups, data = config.settings.key_groups, config.data
    if config.kind not in SETTINGS:
        return  # a task outside the package has columns of its own
    if "labeled texts" in groups or "few-shot" in groups:
        number_label_columns(data)
    elif "tags" in groups:
        number_tag_column(data)
    elif "embeddings" in groups:
        require_embedding_columns(data)
    elif "graph" in groups:
        for path in local_files(data):
            has_bare_triples(path, data)


@dataclass(frozen=True)
class _FirstLine:
    """The values of a table's first line, none of which is a wanted name, compared with later lines that differ."""

    path: Path
    values: tuple[str, ...]
    repeated: tuple[int, ...]  # columns whose value occurs again, in the first line in which any does
    numeric: tuple[int, ...]  # columns with numbers only, up to that line

    @classmethod
    def of(cls, path: Path, names: Iterable[str | int]) -> _FirstLine | None:
        """Reads a table; None if it is empty or its first line has one of the wanted `names`."""
        lines = _lines(path)
        values, repeated = next(lines, ()), list[int]()
        if {value.strip().casefold() for value in values} & {str(name).casefold() for name in names}:
            return None
        numeric = [column for column, value in enumerate(values) if _is_number(value)]
        for line in lines:
            if line != values:
                same = zip(values, line, strict=False)
                repeated = [column for column, (value, other) in enumerate(same) if value and value == other]
                numeric = [column for column in numeric if column < len(line) and _is_number(line[column])]
            if repeated:
                break
        return cls(path, values, (*repeated,), (*numeric,)) if values else None

    @property
    def label_column(self) -> int | None:
        """The column of the label if the line is a text and its label."""
        found = self.repeated or self.numeric
        if len(self.values) != 2 or len(found) != 1:
            return None
        return found[0] if len(self.values[1 - found[0]].split()) > 1 else None

    @property
    def looks_like_data(self) -> bool:
        is_text = any(len(value.split()) >= MANY_WORDS for value in self.values)
        return bool(self.repeated or self.numeric or is_text) and not self.numbers_columns

    @property
    def numbers_columns(self) -> bool:
        """True if the values are 0, 1, 2, ..., the header that pandas writes for columns without names."""
        return self.values == tuple(map(str, range(len(self.values))))

    def refusal(self, advice: str) -> ConfigError:
        shown = (value[:SHOWN_CHARACTERS] for value in self.values[:SHOWN_COLUMNS])
        columns = ", ".join(f'{number} is "{value}"' for number, value in enumerate(shown))
        return ConfigError(
            f"{self.path}: its first line looks like data instead of names of columns (column {columns}); {advice}."
        )


def _lines(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the values of the readable lines of a table, up to `MAX_LINES`."""
    for row in islice(read_rows(path, header=False), MAX_LINES):
        if row.problem is None:
            yield tuple(row.value.values())


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def number_label_columns(data: DataConfig) -> tuple[DataConfig, str | None]:
    """Returns the settings with the numbers of the columns of the text and its label, and a clause on what they are.

    Both are set only if no table has a header, and None is returned if there was nothing to set. Raises ConfigError if
    a first line looks like data, but the columns are unclear, or if it names columns that are set by number.
    """
    files = local_files(data, text_rows=True)
    tables = [path for path in files if file_form(path) in TABLES]
    require_no_header(data)
    if not data.has_header or not tables:
        return data, None
    texts = TEXT_NAMES if data.text_column is None else (data.text_column,)
    labels = LABEL_COLUMNS if data.label_column is None else (data.label_column,)
    pair = PAIR_COLUMN if data.text_pair_column is None else data.text_pair_column
    unnamed = [first for path in tables if (first := _FirstLine.of(path, (*texts, *labels, pair)))]
    suspect = next((first for first in unnamed if first.looks_like_data), None)
    if suspect is None:
        return data, None
    label = suspect.label_column
    is_named = any(column is not None for column in (data.text_column, data.label_column, data.text_pair_column))
    agree = len(unnamed) == len(files) and all(first.label_column == label for first in unnamed)
    if label is not None and agree and not is_named:
        update = {"text_column": 1 - label, "label_column": label}
        columns = f"text = column {1 - label}, label = column {label}"
        return data.model_copy(update=update), f"{suspect.path}: its first line is data, so it has no header: {columns}"
    numbers = (
        "set data.text_column and data.label_column to the numbers of their columns"
        if label is None
        else f"set data.text_column to {1 - label} and data.label_column to {label}"
    )
    raise suspect.refusal(f"{numbers} if no file has a header, or add a first line with the names of the columns")


def require_no_header(data: DataConfig) -> None:
    """Raises ConfigError if columns are set by number, but a table's first line has the usual name of the label there.

    If the label is not set or the table has none, the usual name of the text decides.
    """
    chosen = {"label_column": LABEL_COLUMNS, "text_column": TEXT_NAMES}
    for path in () if data.has_header else local_files(data, text_rows=True):
        values = next(_lines(path), ()) if file_form(path) in TABLES else ()
        numbers = {key: column for key in chosen if isinstance(column := getattr(data, key), int)}
        inside = {key: column for key, column in numbers.items() if -len(values) <= column < len(values)}
        key, column = next(iter(inside.items()), ("", 0))
        if inside and values[column].strip().casefold() in chosen[key]:
            raise ConfigError(
                f"{path}: its first line is a header with the column {values[column]}, but data.{key} {column} is "
                f"the number of a column in files without one; remove that line, or set data.{key} to the name."
            )


def require_embedding_columns(data: DataConfig) -> None:
    """Raises ConfigError if the first line of a table looks like data, but the columns are looked up by name."""
    chosen = (data.text_column, data.text_pair_column, data.label_column)
    named = [column for column in chosen if column is not None]
    names = named or [*PAIR_COLUMNS, *SCORE_COLUMNS, *(name for pair in TEXT_COLUMNS for name in pair)]
    tables = [path for path in local_files(data, text_rows=True) if file_form(path) in TABLES]
    for path in tables if data.has_header else ():
        first = _FirstLine.of(path, names)
        if first is not None and first.looks_like_data:
            raise first.refusal(
                "set data.text_column, data.text_pair_column and data.label_column to the numbers of their columns, or "
                "add a first line with names such as text1, text2 and score"
            )


def number_tag_column(data: DataConfig) -> tuple[DataConfig, str | None]:
    """Returns the settings with the number of the column of the tags, and a clause on what the columns are.

    It is set only if every file has CoNLL columns, and None is returned if there was nothing to set. Raises ConfigError
    if a table has none, because only they can hold tags.
    """
    files = local_files(data)
    others = [path for path in files if file_form(path) in TAGGED_FORMS]
    if data.tag_column is not None or not others:
        return data, None
    wrong = [path for path in others if not _has_tagged_words(path)]
    if table := next((path for path in wrong if file_form(path) in TABLES), None):
        raise ConfigError(
            f"{table} is a table, which cannot hold lists of tokens and tags, and it does not look like CoNLL columns, "
            "one word with its tag per line and an empty line after each sentence; if it has them nevertheless, set "
            "data.tag_column to the number of the column of the tags, or -1 for the last."
        )
    if wrong or any(file_form(path) not in (*TAGGED_FORMS, ".conll") for path in files):
        return data, None
    columns = f"word = column 0, tag = column {DEFAULT_TAG_COLUMN}, the last"
    clause = f"{others[0]}: its lines are words with their tags, so it is read as CoNLL columns: {columns}"
    return data.model_copy(update={"tag_column": DEFAULT_TAG_COLUMN}), clause


def _has_tagged_words(path: Path) -> bool:
    """Returns whether a file has sentences of words with tags: the first tag and an empty line occur among others."""
    first: list[str] = []
    has_ends = is_repeated = False
    for line in islice(read_lines(path, blank=True), MAX_LINES):
        columns = [] if line.problem else conll_columns(line.value)
        if not first:
            first = columns
            if len(first) == 1 and first[0] != "-DOCSTART-":
                return False
            first = [] if len(first) == 1 else first
        elif not columns:
            has_ends = has_ends or not line.problem
        elif columns[0] != first[0] and columns[-1] == first[-1]:
            is_repeated = True
        if has_ends and is_repeated:
            return not {value.casefold() for value in first} & _TAGGED_NAMES
    return False


def has_bare_triples(path: Path, data: DataConfig) -> bool:
    """Returns whether each line of a table is a head, a relation and a tail, without a header.

    Raises ConfigError if its first line looks like that, but not clearly.
    """
    if file_form(path) not in TABLES or not data.has_header:
        return False
    first = _FirstLine.of(path, ROW_KEYS if data.text_column is None else (*ROW_KEYS, data.text_column))
    if first is None or len(first.values) != len(FACT_KEYS) or not first.looks_like_data:
        return False
    if _is_triple(path, first.values):
        return True
    raise first.refusal(
        f"if its lines are triples, add a first line with the names {', '.join(FACT_KEYS)}; otherwise one with the "
        "names of the columns"
    )


def _is_triple(path: Path, first: tuple[str, ...]) -> bool:
    """Returns whether the relation of the first line occurs again, and so does its head or tail, or it is no name."""
    head, relation, tail = first
    has_relation, has_end = False, any(_is_no_name(end) for end in (head, tail))
    for line in _lines(path):
        if line != first and len(line) == len(first):
            has_relation = has_relation or line[1] == relation
            has_end = has_end or bool({head, tail} & {line[0], line[2]})
        if has_relation and has_end:
            return True
    return False


def _is_no_name(value: str) -> bool:
    """Returns whether a value cannot be the name of a column: it has several words, or begins with no letter."""
    return len(value.split()) > 1 or not (value[:1].isalpha() or value[:1] == "_")
