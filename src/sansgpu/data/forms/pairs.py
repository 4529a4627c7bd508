"""Texts for embedding models: pairs with negatives, pairs with a similarity score, and texts with a label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sansgpu.data.forms.anchors import (
    PARTNERS,
    SET,
    anchor_columns,
    negative_columns,
    pairs_of_set,
    rated_pair,
    rating_column,
    single_positives,
    texts_in,
)
from sansgpu.data.forms.cells import finite_number
from sansgpu.data.forms.form import Form, Forms, any_row, unused_columns
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import (
    BadRowError,
    Column,
    Row,
    SourceRow,
    TypedRow,
    column_names,
    find_column,
    missing_column,
)
from sansgpu.data.tables import Columns, first_lines_of_data

RowKind = Literal["pairs", "scores", "labels"]
# The kinds in words, for messages.
KINDS: dict[RowKind, str] = {
    "pairs": "an anchor and a positive",
    "scores": "two texts and a score",
    "labels": "a text and a label",
}
TRIPLET_COLUMNS = ("anchor", "positive", "negative")
SCORE_WORDS = ("score", "similarity")  # in names of columns whose numbers are larger for texts of similar meaning
# Pairs of text columns to try, in this order, if none is configured.
PAIR_COLUMNS = (
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text", "text_pair"),
)
LABEL_COLUMNS = ("label", "gold_label", "is_duplicate")  # columns that label pairs of texts
SCORE_COLUMNS = ("score", "similarity_score", "similarity", "relatedness_score", *LABEL_COLUMNS)


@dataclass(frozen=True)
class TextRow(TypedRow):
    """The texts of a row: an anchor with a positive and negatives, two texts with a score, or a text with a label."""

    texts: tuple[str, ...]
    score: float | None = None
    label: str | None = None
    pair_label: str | None = None  # label column of two texts, with a score or a class, such as entailment

    @property
    def kind(self) -> RowKind:
        if self.score is not None or self.pair_label is not None:
            return "scores"
        return "labels" if self.label is not None else "pairs"


def read_text_rows(
    rows: Iterable[SourceRow], columns: Columns, bad_rows: RowReport, kind: RowKind | None = None
) -> list[TextRow]:
    """Reads rows in order. All must be of one `kind`, by default that of the first row."""

    checked = of_one_kind(kind)

    def read(row: SourceRow) -> TextRow:
        return checked(TEXT_GROUPS.read(row, columns, bad_rows))

    is_configured = columns.text is not None or columns.pair is not None
    return list(bad_rows.parsed(rows if is_configured else TEXT_GROUPS.single_rows(rows), read))


def of_one_kind(kind: RowKind | None = None) -> Callable[[TextRow], TextRow]:
    """Returns a function that passes rows of one `kind`, by default that of the first, and raises BadRowError else."""

    def checked(row: TextRow) -> TextRow:
        nonlocal kind
        kind = kind or row.kind
        if row.kind != kind:
            raise row.error(f"it has {KINDS[row.kind]}, but the rows before it have {KINDS[kind]}")
        return row

    return checked


def _is_anchored(row: Row, columns: Columns) -> bool:
    return columns.text is None and columns.pair is None and anchor_columns(row) is not None


def _is_anchored_by_usual_names(row: Row, columns: Columns) -> bool:
    return _is_anchored(row, columns) and not {"anchor", "positive"}.isdisjoint(row)


def _has_lists(row: Row, columns: Columns) -> bool:
    return _is_anchored(row, columns) and "pos" in row


def _is_set(row: Row, columns: Columns) -> bool:
    return columns.text is None and columns.pair is None and isinstance(row.get(SET), list)


def _anchored(row: SourceRow, columns: Columns) -> TextRow:
    found = anchor_columns(row.value)
    assert found is not None  # because `_is_anchored` recognized the row
    anchor, positives = _column_text(row, found.anchor), texts_in(row, found.positives)
    if not positives:
        raise row.error(f"it has no {found.positives[0]}")
    return TextRow(row.where, (anchor, positives[0], *texts_in(row, found.negatives)))


def _unused_of_anchored(row: Row, columns: Columns) -> Iterator[str]:
    found = anchor_columns(row)
    return unused_columns(row, found.all if found else ())


def _usual_pair(row: Row) -> tuple[str, str] | None:
    usual = next(((first, second) for first, second in PAIR_COLUMNS if first in row and second in row), None)
    return usual or rated_pair(row)


def _has_two_texts(row: Row, columns: Columns) -> bool:
    return columns.pair is not None or (columns.text is None and _usual_pair(row) is not None)


def _scored(row: SourceRow, columns: Columns) -> TextRow:
    if columns.pair is None:
        first, second = _usual_pair(row.value) or PAIR_COLUMNS[0]
    else:
        first, second = _set_column(row, columns.text, "text"), _set_column(row, columns.pair)
    texts = _column_text(row, first), _column_text(row, second)
    score = find_column(row.value, columns.label, SCORE_COLUMNS)
    if score is None and columns.pair is None and (rating := rating_column(row.value)) is not None:
        raise row.error(
            f"it has {first}, {second} and {rating}; set data.label_column to {rating} if it is the similarity of the "
            f"two, or data.text_column to {first} and data.text_pair_column to {second} if they always belong together"
        )
    if score is None and columns.label is None and columns.pair is not None:
        # the configuration names both columns, so the pair needs no score
        return TextRow(row.where, (*texts, *texts_in(row, negative_columns(row.value))))
    value = row.value.get(score)
    if score is None or any(word in str(score).casefold() for word in SCORE_WORDS):
        return TextRow(row.where, texts, score=_score(row, value))
    word = str(int(value)) if isinstance(value, bool) else str(value if value is not None else "").strip()
    if not word:
        raise row.error(f"it has no {score}")
    return TextRow(row.where, texts, score=finite_number(word), pair_label=row.valid_text(word, str(score)))


def _unused_of_scored(row: Row, columns: Columns) -> Iterator[str]:
    pairs = *PAIR_COLUMNS, rated_pair(row) or ()
    negatives = negative_columns(row) if columns.pair is not None else ()
    return unused_columns(row, (*SCORE_COLUMNS, *(name for pair in pairs for name in pair), *negatives), columns)


def _labeled(row: SourceRow, columns: Columns) -> TextRow:
    if columns.text is None and "text" not in row.value:
        raise BadRowError(
            f"{row.where} has the columns {column_names(row.value)}; rows need anchor and positive, text1, text2 and "
            "score, or text and label, or set data.text_column, data.text_pair_column and data.label_column."
        )
    text = _column_text(row, _set_column(row, columns.text, "text"))
    return TextRow(row.where, (text,), label=_label(row, "label" if columns.label is None else columns.label))


def _set_column(row: SourceRow, column: Column | None, otherwise: str = "") -> Any:
    """Returns the key of a column that the configuration names. Raises BadRowError if it does not exist."""
    if column is None:
        return otherwise
    if (key := find_column(row.value, column)) is None:
        raise missing_column(row.value, column, "data.text_column and data.text_pair_column", row.where)
    return key


def _column_text(row: SourceRow, column: Any) -> str:
    return _text(row, str(column), row.value.get(column))


def _text(row: SourceRow, name: str, text: Any) -> str:
    if text is None:
        raise row.error(f"it has no {name}")
    text = row.valid_text(text, name)
    if not text.strip():
        raise row.error(f"its {name} is empty")
    return str(text)


def _label(row: SourceRow, column: Column) -> str:
    value = row.value.get(find_column(row.value, column))
    if value is None or (isinstance(value, str) and not value.strip()):
        raise row.error(f"it has no {column}")
    if not isinstance(value, (str, int)):
        raise row.error(f"its {column} is {value!r} instead of a string or an integer")
    return row.valid_text(str(value).strip(), str(column))


def _score(row: SourceRow, value: Any) -> float:
    if value is None or value == "":
        raise row.error("it has no score")
    score = finite_number(value)
    if score is None:
        raise row.error(f"its score is {value!r} instead of a finite number")
    return score


def require_names(paths: Sequence[Path], columns: Columns) -> tuple[Columns, str | None]:
    """Raises ConfigError if the first line of a table looks like data, because columns are found by name."""
    usual = (*TRIPLET_COLUMNS, *SCORE_COLUMNS, *(name for pair in (*PAIR_COLUMNS, *PARTNERS) for name in pair))
    for first in first_lines_of_data(paths, columns, columns.named or usual):
        if first.looks_like_data:
            raise first.refusal(
                "set data.text_column, data.text_pair_column and data.label_column to the numbers of their columns, or "
                "add a first line with names such as text1, text2 and score"
            )
    return columns, None


def _row_of_texts(texts: list[Any]) -> Row | None:
    """Returns the columns of a row that is a list of an anchor, its positive and negatives."""
    return {"anchor": texts[0], "positive": texts[1], "negatives": texts[2:]} if len(texts) > 1 else None


TEXT_GROUPS = Forms("texts", (
    Form(("anchor", "positive"), _anchored,
         {"anchor": "What is a fox?", "positive": "A fox is an animal.", "negative": "The sky is blue."},
         ("negative",), _is_anchored_by_usual_names, single_positives, _unused_of_anchored),
    Form(("query", "pos", "neg"), _anchored,
         {"query": "What is a fox?", "pos": ["A fox is an animal."], "neg": ["The sky is blue.", "A cat sleeps."]},
         (), _has_lists, single_positives, _unused_of_anchored),
    Form(("question", "answer"), _anchored, {"question": "What is a fox?", "answer": "A fox is an animal."},
         ("hard_negatives",), _is_anchored, single_positives, _unused_of_anchored),
    Form((SET,), _anchored, {SET: ["A plane takes off.", "An airplane departs.", "A plane is leaving."]},
         recognizes=_is_set, split=pairs_of_set),
    Form(("text1", "text2", "score"), _scored,
         {"text1": "A plane takes off.", "text2": "An airplane departs.", "score": 0.9},
         ("sentence1", "sentence2", "text", "text_pair", "similarity_score", "similarity", "label"), _has_two_texts,
         unused=_unused_of_scored),
    Form(("text", "label"), _labeled, {"text": "A great film.", "label": "good"}, recognizes=any_row),
), text_rows=True, resolve=require_names, list_row=_row_of_texts,
   other_names=(*SCORE_COLUMNS, *(name for pair in PAIR_COLUMNS for name in pair)))  # fmt: skip
