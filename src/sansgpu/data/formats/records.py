"""Reads records whose fields may be in quotes and have several lines; recovers from quotes that do not close."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sansgpu.config import ConfigError
from sansgpu.data.formats.opening import MAX_LINE

NOT_CLOSED = "does not close"  # in the problem of a record whose quote is still open at the end
MAX_REREAD = 4 * MAX_LINE  # characters of a file that may be read again, after quotes that do not close


class TextLine(NamedTuple):
    """A line of a text file with its line end. `problem` says why it cannot be read."""

    number: int
    text: str
    problem: str = ""


class Record(NamedTuple):
    """The fields of one record. `problem` says why it cannot be read; `line` is where it or its flaw starts."""

    line: int
    fields: list[str]
    problem: str = ""


class _Feed:
    """Passes lines to a csv.reader, and keeps those of the current record."""

    def __init__(self, path: Path, lines: Iterable[TextLine]) -> None:
        self._path, self._lines = path, iter(lines)
        self._again: deque[TextLine] = deque()
        self._budget = MAX_REREAD
        self.used: list[TextLine] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self.used.append(line)
        return line.text

    def read_again_after(self, number: int) -> None:
        """Passes the lines of the current record after line `number` once more."""
        rest = [line for line in self.used if line.number > number]
        self._again.extendleft(reversed(rest))
        self._budget -= sum(len(line.text) for line in rest)
        if self._budget < 0:
            raise ConfigError(
                f"{self._path} has many quotes that do not close, e.g. in line {number}; write the table again with a "
                "program that doubles the quotes in a text."
            )


def quoted_records(
    path: Path, lines: Iterable[TextLine], separator: str, columns: int = 0, skip_spaces: bool = False
) -> Iterator[Record]:
    """Yields the records of a table. Lines that are blank are none.

    A quote that does not close makes a record with a problem of its line alone, and the lines after it are read as if
    it was not there. Such a quote shows in that it closes within a field, or, if the table has `columns`, after lines
    that are complete records.
    """
    csv.field_size_limit(MAX_LINE)
    feed = _Feed(path, lines)
    reader = csv.reader(feed, delimiter=separator, skipinitialspace=skip_spaces, strict=True)
    while True:
        feed.used.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            opened = _opening_line(feed.used)
            yield Record(opened, [], _describe(path, str(error), opened, feed.used))
        else:
            if not fields:
                continue
            if len(feed.used) == 1:
                yield Record(feed.used[0].number, fields, feed.used[0].problem)
                continue
            if not _has_swallowed_records(feed.used, len(fields), separator, columns):
                problem = next((line.problem for line in feed.used if line.problem), "")
                yield Record(feed.used[0].number, fields, problem)
                continue
            opened = _opening_line(feed.used)
            yield Record(opened, [], _describe(path, "its quotes contain other rows", opened, feed.used))
        feed.read_again_after(opened)
        reader = csv.reader(feed, delimiter=separator, skipinitialspace=skip_spaces, strict=True)


def _describe(path: Path, error: str, opened: int, used: list[TextLine]) -> str:
    reason = error
    if "end of data" in error or "field limit" in error:
        reason = f"the quote that opens here {NOT_CLOSED} ({error})"
    elif len(used) > 1:
        reason = f"the quote that opens here closes only in line {used[-1].number} ({error})"
    return f"{path}, line {opened} is not valid CSV: {reason}; fix or remove the row."


def _opening_line(used: list[TextLine]) -> int:
    """Returns the number of the line in which the last quote opens."""
    opened, is_open = used[0].number, False
    for line in used[:-1]:
        if line.text.count('"') % 2:
            is_open = not is_open
            opened = line.number if is_open else opened
    return opened


def _has_swallowed_records(used: list[TextLine], fields: int, separator: str, columns: int) -> bool:
    """Returns whether a record has the wrong number of fields, and one of its lines would have the right one."""
    if columns < 2 or fields == columns:
        return False
    return any(line.text.count(separator) == columns - 1 for line in used[1:])
