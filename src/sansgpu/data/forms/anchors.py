"""Finds a row's anchor, positives and negatives by the names of its columns, as public data sets call them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.form import is_empty
from sansgpu.data.rows import Column, Row, SourceRow

_WHAT = r"(?:[ _-]?(?:passage|document|doc|text|ctx|context|sentence|sample|example|answer|response|code)s?)?"
# BGE calls them pos and neg, SimCSE hard_neg, DPR hard_negative_ctxs, Tevatron negative_passages; or negative_1, neg2.
_POSITIVE = re.compile(rf"(?:hard[ _-]?)?pos(?:itive)?s?{_WHAT}(?:[ _-]?\d+)?")
_NEGATIVE = re.compile(rf"(?:hard[ _-]?)?neg(?:ative)?s?{_WHAT}(?:[ _-]?\d+)?")
ANCHORS = ("anchor", "query", "question", "sent0", "sentence", "claim", "title")  # in the order in which they are tried
# Columns of an anchor and its positive, in the order in which they are tried.
PARTNERS = (
    *((anchor, positive) for anchor in ("anchor", "query", "question") for positive in (
        "answer", "passage", "document", "doc", "response", "relevant_document", "answers", "context")),
    ("sent0", "sent1"), ("title", "body"), ("title", "abstract"), ("title", "article"), ("title", "description"),
    ("title", "citation"), ("comment", "code"), ("docstring", "code"), ("text", "summary"), ("article", "summary"),
    ("text", "simplified"), ("english", "non_english"), ("caption1", "caption2"), ("title1", "title2"),
    ("body1", "body2"), ("post1", "post2"), ("claim", "evidence"),
)  # fmt: skip
# Columns that say whether, or how much, the two texts belong together; such rows are no pairs of equal meaning.
RATINGS = ("label", "score", "similarity", "similarity_score", "relevance", "relevance_score", "is_relevant",
           "is_duplicate", "relevant")  # fmt: skip
SET = "set"  # a column with several texts of the same meaning


@dataclass(frozen=True)
class AnchorColumns:
    """The keys of a row's columns. `positives` and `negatives` may hold one text, or a list of them."""

    anchor: Any
    positives: tuple[Any, ...]
    negatives: tuple[Any, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        return self.anchor, *self.positives, *self.negatives


def anchor_columns(row: Row) -> AnchorColumns | None:
    """Returns the columns of an anchor and its positives; None if the row has no such columns, or rates its texts."""
    if rated_pair(row) is not None:
        return None
    positives, negatives = _matching(row, _POSITIVE), negative_columns(row)
    if positives:
        return AnchorColumns(_anchor(row), positives, negatives)
    if (pair := _partners(row)) is not None:
        return AnchorColumns(pair[0], (pair[1],), negatives)
    return AnchorColumns("anchor", ("positive",), negatives) if "anchor" in row else None


def rated_pair(row: Row) -> tuple[Any, Any] | None:
    """Returns the columns of two texts that belong together as much as another column says; None without such."""
    if rating_column(row) is None or negative_columns(row):
        return None
    positives = _matching(row, _POSITIVE)
    return (_anchor(row), positives[0]) if len(positives) == 1 else None if positives else _partners(row)


def rating_column(row: Row) -> Any:
    """Returns the key of the column that says how much two texts belong together; None if there is no such column."""
    names = _plain_names(row)
    return next((names[name] for name in RATINGS if name in names and row[names[name]] is not None), None)


def negative_columns(row: Row) -> tuple[Any, ...]:
    return _matching(row, _NEGATIVE)


def _anchor(row: Row) -> Any:
    """Returns the key of the anchor's column, preferably of one with a value."""
    names = _plain_names(row)
    found = [names[name] for name in ANCHORS if name in names]
    return next((key for key in found if row[key] is not None), found[0] if found else "anchor")


def _partners(row: Row) -> tuple[Any, Any] | None:
    """Returns the columns of two texts that belong together, preferably of two with values."""
    names = _plain_names(row)
    found = [(names[one], names[two]) for one, two in PARTNERS if {one, two} <= {*names}]
    filled = (pair for pair in found if all(row[key] is not None for key in pair))
    return next(filled, found[0] if found else None)


def _plain_names(row: Row) -> dict[str, Any]:
    return {key.strip().casefold(): key for key in row if isinstance(key, str)}


def _matching(row: Row, names: re.Pattern[str]) -> tuple[Any, ...]:
    """Returns the keys whose name matches, except columns of numbers, such as counts or classes."""
    found = (key for name, key in _plain_names(row).items() if names.fullmatch(name))
    return tuple(key for key in found if row[key] is None or isinstance(row[key], (str, list, tuple, dict)))


def texts_in(row: SourceRow, keys: Iterable[Column]) -> list[str]:
    """Returns the texts in columns, which hold a text, a list of texts, or of objects with `text` and maybe `title`.

    Raises BadRowError if one is not a text or is empty. An empty column has none.
    """
    found = []
    for key in keys:
        value = row.value.get(key)
        for one in _values(key, value):
            text = row.valid_text(_passage_text(one), str(key))
            if not text.strip():
                raise row.error(f"its {key} is empty")
            found.append(text)
    return found


def _values(key: Column, value: Any) -> list[Any]:
    """Returns the values of a column as a list, without empty ones. Tables store lists as JSON or Python's notation."""
    if value is None or value == "":
        return []
    if isinstance(key, str) and re.search(r"(?:pos|neg|[^s]s)$", key.strip().casefold()):
        parsed = parsed_cell(value)
        are_texts = isinstance(parsed, list) and all(isinstance(one, (str, NoneType)) for one in parsed)
        value = parsed if are_texts else value
    return [one for one in value if not is_empty(one)] if isinstance(value, (list, tuple)) else [value]


def _passage_text(value: Any) -> Any:
    """Returns the text of a passage with its title before it, as DPR and Tevatron store them."""
    if not isinstance(value, dict):
        return value
    title, text = value.get("title"), value.get("text", value.get("contents"))
    return f"{title} {text}" if isinstance(title, str) and title.strip() and isinstance(text, str) else text


def single_positives(row: SourceRow) -> Iterator[SourceRow]:
    """Yields a row for each positive of a row that has several, each with all negatives."""
    columns = anchor_columns(row.value)
    values = [(key, one) for key in columns.positives for one in _values(key, row.value.get(key))] if columns else []
    if columns is None or len(values) < 2:
        yield row
        return
    others = {key: value for key, value in row.value.items() if key not in columns.positives}
    for number, (key, value) in enumerate(values, 1):
        yield SourceRow(f"{row.where}, positive {number}", {**others, key: value})


def pairs_of_set(row: SourceRow) -> Iterator[SourceRow]:
    """Yields the pairs of the first text of a set with each other one."""
    first, *others = row.value[SET] if isinstance(row.value[SET], list) else [None]
    rest = {key: value for key, value in row.value.items() if key != SET}
    if not others:
        yield row._replace(problem=str(row.error("its set has fewer than two texts")))
    for number, other in enumerate(others, 2):
        yield SourceRow(f"{row.where}, text {number}", {**rest, "anchor": first, "positive": other})
