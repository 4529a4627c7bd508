"""Handles the invalid rows of a source, and reports what is in its rows but not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from sansgpu.config import ConfigError
from sansgpu.config.data import DataConfig
from sansgpu.config.wording import counted, truncate
from sansgpu.data.rows import BadRowError, LeftOutError

SKIPPED_WITHOUT_LIMIT = 10  # invalid rows that may always be skipped, so that a small sample can be tried
MAX_PROBLEMS = 1000  # error messages to keep
MAX_UNUSED_CHARACTERS = 400  # longest list of unused columns

_Row = TypeVar("_Row")
_T = TypeVar("_T")


def counted_parts(rows: Counter[str]) -> str:
    """Lists parts of rows with the number of rows that have them, the most frequent first."""
    first, *others = rows.most_common()
    return ", ".join([f"{first[0]!r} ({counted(first[1], 'row')})", *(f"{name!r} ({count})" for name, count in others)])


def are_too_many(skipped: int, rows: int, limit: float) -> bool:
    """Returns whether more rows were skipped than the share `limit` of all rows allows."""
    return skipped > max(limit * rows, SKIPPED_WITHOUT_LIMIT)


class RowReport:
    """Handles the invalid rows of one source, and counts what its rows have but nothing uses.

    An invalid row is an error with `on_bad_row` "fail". Otherwise it is skipped and counted, up to the share `limit` of
    all rows.
    """

    def __init__(self, on_bad_row: Literal["fail", "skip"], limit: float = 1.0) -> None:
        self._fail = on_bad_row == "fail"
        self._limit = limit
        self._unused: Counter[str] = Counter()
        self._remarks: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()  # valid rows that are not used, by reason
        self.rows = 0  # rows read from the source
        self.skipped = 0
        self.first: str | None = None  # error message of the first invalid row
        self.problems: dict[str, str] = {}  # error messages of the first invalid rows, by location

    @classmethod
    def of(cls, data: DataConfig) -> RowReport:
        return cls(data.on_bad_row, data.max_bad_rows)

    def parsed(self, rows: Iterable[_Row], parse: Callable[[_Row], _T]) -> Iterator[_T]:
        """Yields `parse(row)` for each row, except those for which it raises BadRowError.

        Several steps of reading may each call it with the rows that are left. Raises BadRowError at the first invalid
        row if these are errors, and ConfigError at the end if too many were skipped.
        """
        seen = 0
        for row in rows:
            seen += 1
            try:
                value = parse(row)
            except LeftOutError as error:
                self.left_out[error.reason] += 1
            except BadRowError as error:
                if self._fail:
                    raise BadRowError(f"{str(error).removesuffix('.')}, or set data.on_bad_row to skip.") from None
                self.first = self.first or str(error)
                if len(self.problems) < MAX_PROBLEMS:
                    self.problems[getattr(row, "where", "")] = str(error)
                self.skipped += 1
            else:
                yield value
        self.rows = max(self.rows, seen)
        self._require_few_skipped()

    def _require_few_skipped(self) -> None:
        if are_too_many(self.skipped, self.rows, self._limit):
            raise ConfigError(
                f"{self.skipped} of {self.rows} rows are invalid, more than data.max_bad_rows={self._limit:g} allows; "
                f"correct them or raise data.max_bad_rows; the first: {self.first}"
            )

    def not_used(self, names: Iterable[str]) -> None:
        """Counts parts of one row, e.g. its columns, that have a value but that nothing uses."""
        for name in names:
            self._unused[name] += 1

    def remark(self, what: str) -> None:
        """Counts a row about which the user is told `what`, e.g. that its answer was found at a different place."""
        self._remarks[what] += 1

    @property
    def unused(self) -> dict[str, int]:
        """The number of rows for each part of rows that is not used, the most frequent first."""
        return dict(self._unused.most_common())

    def notes(self) -> list[str]:
        """Returns messages about the rows that were skipped or left out, and about what was not used, if any."""
        notes = []
        if self.skipped:
            notes.append(f"bad rows skipped: {self.skipped} of {self.rows}; the first: {self.first}")
        if self.left_out:
            counts = (f"{counted(count, 'row')} {reason}" for reason, count in self.left_out.items())
            notes.append(f"left out: {', '.join(counts)}")
        notes += [f"{what}: {counted(count, 'row')}" for what, count in self._remarks.items()]
        if self._unused:
            notes.append(truncate(f"columns not used: {counted_parts(self._unused)}", MAX_UNUSED_CHARACTERS))
        return notes

    def report(self, note: Callable[[str], None]) -> None:
        """Passes the messages, if any, to `note`."""
        for message in self.notes():
            note(message)
