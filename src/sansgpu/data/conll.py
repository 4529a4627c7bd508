"""Reads the CoNLL format: one token and its tags per line, with an empty line after each sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sansgpu.config import ConfigError
from sansgpu.data.rows import SourceRow

DEFAULT_TAG_COLUMN = -1
MAX_TOKENS = 1_000_000  # tokens per sentence; without a limit, a file without empty lines could exhaust memory
_BLANKS = re.compile(r"[ \t]+")  # str.split() also splits at Unicode spaces, which tokens of tweets may contain


def conll_rows(lines: Iterable[SourceRow], tag_column: int) -> Iterator[SourceRow]:
    """Yields a row {"tokens": [...], "tags": [...]} for each sentence of `lines`, which include empty lines.

    The first column is the token. The location of a sentence is its first line. If a line is invalid, the row of its
    sentence has a `problem`. Raises ConfigError if a sentence is longer than `MAX_TOKENS`.
    """
    sentence = _Sentence()
    for line in lines:
        columns = [] if line.problem else conll_columns(line.value)
        if line.problem is None and (not columns or columns[0] == "-DOCSTART-"):
            yield from sentence.rows()
            sentence = _Sentence()
        else:
            sentence.add(line, columns, tag_column)
    yield from sentence.rows()


def as_text(sentence: SourceRow) -> SourceRow:
    """Returns a row whose value is the sentence as one string, with spaces between the tokens."""
    return sentence if sentence.problem else sentence._replace(value=" ".join(sentence.value["tokens"]))


class _Sentence:
    def __init__(self) -> None:
        self._tokens: list[str] = []
        self._tags: list[str] = []
        self._where = ""
        self._problem: str | None = None

    def add(self, line: SourceRow, columns: list[str], tag_column: int) -> None:
        self._where = self._where or line.where
        place = tag_column if tag_column >= 0 else len(columns) + tag_column
        problem = line.problem
        if problem is None and not 0 < place < len(columns):
            count = f"{len(columns)} column{'s' if len(columns) != 1 else ''}"
            problem = (
                f"{line.where} has {count}, so there is no tag in column {tag_column}; fix the line or set "
                "data.tag_column."
            )
        if problem is None:
            self._tokens.append(columns[0])
            self._tags.append(columns[place])
        self._problem = self._problem or problem
        if len(self._tokens) > MAX_TOKENS:
            raise ConfigError(
                f"{self._where}: the sentence has more than {MAX_TOKENS:,} tokens; put an empty line between sentences."
            )

    def rows(self) -> Iterator[SourceRow]:
        if self._problem:
            yield SourceRow(self._where, None, self._problem)
        elif self._where:
            yield SourceRow(self._where, {"tokens": self._tokens, "tags": self._tags})


def conll_columns(line: str) -> list[str]:
    """Splits a line at tabs or, if it has none, at spaces; an empty line has no columns."""
    stripped = line.strip(" \t\r\n")
    if "\t" in stripped:
        return [column.strip(" ") for column in stripped.split("\t")]
    return _BLANKS.split(stripped) if stripped else []
