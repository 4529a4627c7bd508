"""Measures how well rows fit the forms of a task, so that a few bad rows do not change the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from sansgpu.data.forms.form import Form, Forms, any_row, is_empty, is_missing
from sansgpu.data.forms.label_columns import is_id_column
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.rows import BadRowError, LeftOutError, SourceRow
from sansgpu.data.tables import Columns

MIN_VALID = 0.5  # share of the rows that must be valid for a task
FORGIVEN_ROWS = 1  # invalid rows that never count, so that a small file may have one
INVALID_STEPS = 4  # tasks are equally good if their shares of invalid rows are the same, rounded to 1 / INVALID_STEPS
_TEXT = ("text",)


@dataclass(frozen=True)
class KindFit:
    """How well rows fit the forms of one kind of rows."""

    kind: str
    rows: int  # without those whose own values leave them out
    valid: int
    recognized: int  # valid rows, and others with the columns of a form
    unused: float  # columns that are not used: the median over rows
    is_certain: bool  # most rows have all columns of their form under usual names
    form: str  # the form of the first valid row
    problem: str | None  # the message about the first invalid row

    @property
    def is_good(self) -> bool:
        return self.valid > 0 and self.valid + FORGIVEN_ROWS >= MIN_VALID * self.rows

    @property
    def is_nearly_good(self) -> bool:
        """True if most rows have the columns of the task, but too few are valid."""
        return not self.is_good and self.recognized > 0 and self.recognized >= MIN_VALID * self.rows

    @property
    def quality(self) -> tuple[float, bool, int]:
        """The order of tasks: the task with the least value fits the rows best."""
        counted = max(0, self.rows - self.valid - FORGIVEN_ROWS)
        return self.unused, not self.is_certain, round(INVALID_STEPS * counted / max(1, self.rows))


@dataclass(frozen=True)
class _RowFit:
    """How a row fits the forms."""

    form: str | None  # None: the row has the columns of none
    unused: int
    is_incomplete: bool
    problem: str | None = None


def fit_of(kind: str, sample: Iterable[SourceRow], columns: Columns) -> KindFit:
    """Measures how well rows fit the forms of a kind."""
    fits = [fit for row in sample if (fit := _row_fit(FORMS[kind], row, columns)) is not None]
    valid = [fit for fit in fits if fit.problem is None]
    return KindFit(
        kind,
        len(fits),
        len(valid),
        sum(fit.form is not None for fit in fits),
        median([fit.unused for fit in fits] or [0]),
        2 * sum(fit.is_incomplete for fit in valid) <= len(valid),
        next((fit.form for fit in valid if fit.form), ""),
        next((fit.problem for fit in fits if fit.problem is not None), None),
    )


def _row_fit(forms: Forms[Any], row: SourceRow, columns: Columns) -> _RowFit | None:
    """Returns how a row fits, or None if its own values leave it out."""
    problem: str | None = None
    try:
        forms.read(row, columns)
    except LeftOutError:
        return None
    except BadRowError as error:
        problem = str(error)
    named = row._replace(value=forms.with_usual_names(row.value, columns))
    form = forms.form_of(row.value, columns)
    if form is None or not isinstance(named.value, dict) or (problem and not _has_columns(form, named)):
        given = (
            [name for name, value in row.value.items() if not is_empty(value)] if isinstance(row.value, dict) else []
        )
        return _RowFit(None if problem else "", len(given) or 1 if problem else 0, False, problem)
    unused = {*form.unused_parts(named.value, columns)}
    used = [name for name, value in named.value.items() if not is_missing(value) and str(name) not in unused]
    # Forms that take any row also take a plain text, although others are their usual rows.
    is_plain = forms is not FORMS["texts"] and (len(used) < len(form.keys) or form.keys == _TEXT)
    return _RowFit(form.name, sum(not is_id_column(name) for name in unused), is_plain, problem)


def _has_columns(form: Form[Any], row: SourceRow) -> bool:
    """Returns whether a row that cannot be read has the columns of its form, although the form takes any row."""
    return form.recognizes is not any_row or all(row.value.get(key) is not None for key in form.keys)
