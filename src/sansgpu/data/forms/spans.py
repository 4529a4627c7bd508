"""Texts with spans as annotation tools write them: doccano, Label Studio, Prodigy, spaCy, Dataturks and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sansgpu.data.conll import OUTSIDE
from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.form import is_empty, unused_columns
from sansgpu.data.forms.offsets import GivenSpan, SpannedText
from sansgpu.data.rows import LeftOutError, Row, SourceRow, column_names
from sansgpu.data.tables import Columns

TEXT_COLUMNS = ("text", "content", "document", "sentence", "data")
SPAN_COLUMNS = ("spans", "entities", "ents", "label", "labels", "annotations", "annotation", "denotations")
LABEL_STUDIO_LISTS = ("annotations", "completions")  # the second in versions before 1.0
MARK_COLUMNS = ("answer", "annotation_id")  # these columns say what an annotator did with a text
_LABEL_STUDIO_KEY = MARK_COLUMNS[1]  # in its CSV, TSV and JSON-MIN exports, whose texts without spans have no label
_STARTS = (
    "start", "start_offset", "start_char", "begin", "startOffset", "BeginOffset", "start_pos", "startPos", "start_idx",
    "startIndex", "startCharIndex", "offset",
)  # fmt: skip
_ENDS = (
    "end", "end_offset", "end_char", "stop", "endOffset", "EndOffset", "end_pos", "endPos", "end_idx", "endIndex",
    "endCharIndex",
)  # fmt: skip
_LABELS = ("label", "labels", "hypertextlabels", "entity", "entity_group", "entity_type", "type", "tag", "Type", "obj")
_SAME = ("token_start", "token_end")  # keys of Prodigy and `sansgpu predict`, which follow from the offsets
_LEFT_OUT = ("reject", "ignore")  # answers of Prodigy


class RawSpan(NamedTuple):
    """The values of a span, not checked yet, and the keys that are not used."""

    start: Any
    end: Any
    label: Any
    text: Any
    unused: tuple[str, ...]


def text_column_of(row: Row) -> str | None:
    """Returns the column with the text of a row with spans, or None."""
    return next((name for name in TEXT_COLUMNS if isinstance(row.get(name), str)), None)


def spanned_text(row: SourceRow, columns: Columns) -> SpannedText:
    """Reads a text with its spans. Raises LeftOutError if an annotator rejected the row."""
    if (answer := row.value.get("answer")) in _LEFT_OUT:
        raise LeftOutError(row.where, f"with `answer: {answer}`")
    name = text_column_of(row.value)
    if name is None:
        raise row.error(
            f"it has the columns {column_names(row.value)}, but needs `tokens` and `tags`, or `text` and `spans`"
        )
    text, column = row.required_text(name), span_column(row.value)
    if column is None:
        wrong = next((name for name in SPAN_COLUMNS if not is_empty(row.value.get(name))), None)
        if answer == "accept" or (wrong is None and _LABEL_STUDIO_KEY in row.value):
            return SpannedText(row.where, text, ())
        if wrong is not None:
            raise row.error(f"its {wrong} is of type {type(row.value[wrong]).__name__} instead of a list of spans")
        raise row.error("it has no list `spans`; write an empty list for a text without spans")
    return SpannedText(row.where, text, checked_spans(row, _spans(row.value[column])))


def span_column(row: Row) -> str | None:
    """Returns the column with the spans: the first with a list that is not empty, or else the first with a list."""
    found = [name for name in SPAN_COLUMNS if _listed(row.get(name)) is not None]
    return next((name for name in found if _listed(row[name])), found[0] if found else None)


def unused_of_spans(row: Row, columns: Columns) -> Iterator[str]:
    """Names the columns of a text with spans that are not used, and the further keys of its spans."""
    column = span_column(row)
    yield from unused_columns(row, (str(text_column_of(row)), str(column), "tokens", "answer"), columns)
    yield from dict.fromkeys(key for span in _spans(row.get(column)) for key in span.unused)


def _listed(value: Any) -> list[Any] | None:
    """Returns the spans of a column as a list, or None if it has none."""
    value = parsed_cell(value)
    if isinstance(value, dict):  # {"start": [0], "end": [5], "label": ["PER"]}, or spaCy's groups of spans
        lists = [inner for inner in value.values() if isinstance(inner, list)]
        if _first(value, _STARTS) is not None and len({*map(len, lists)}) == 1 and len(lists) == len(value):
            return [dict(zip(value, values, strict=True)) for values in zip(*lists, strict=True)]
        groups = [group for group in lists if group]
        return groups[0] if len(groups) == 1 and len(lists) == len(value) else None
    return value if isinstance(value, list) else None


def _spans(value: Any) -> list[RawSpan]:
    return [span for item in _listed(value) or () for span in span_items(item)]


def span_items(item: Any) -> Iterator[RawSpan]:
    """Yields the spans of an item of a list of spans, which is one, except in the format of Dataturks."""
    if isinstance(item, dict) and isinstance(item.get("points"), list):
        for point in item["points"]:
            yield from span_items({**item, **point, "points": None} if isinstance(point, dict) else point)
    elif isinstance(item, dict) and isinstance(item.get("span"), dict):  # PubAnnotation
        yield from span_items({**item, **item["span"], "span": None})
    elif isinstance(item, dict) and type(item.get("offset")) is int and type(item.get("length")) is int:
        end = item["offset"] + item["length"]
        yield from span_items({**item, "end": end, "length": None})
    elif isinstance(item, dict):
        start, end, label = (_first(item, names) for names in (_STARTS, _ENDS, _LABELS))
        extra = [f"{key} in a span" for key, value in item.items() if not is_empty(value)]
        known = {f"{key} in a span" for key in (start, end, label, "text", *_SAME)}
        given = item.get(label)
        if isinstance(given, list) and len(given) > 1:
            extra.append("further labels in a span")
        unused = tuple(name for name in extra if name not in known)
        yield RawSpan(item.get(start), item.get(end), given, item.get("text"), unused)
    elif isinstance(item, (list, tuple)) and len(item) >= 3:
        start, end, label = item[:3] if not isinstance(item[0], str) else (item[1], item[2], item[0])
        yield RawSpan(start, end, label, None, ("further values in a span",) if len(item) > 3 else ())
    else:
        yield RawSpan(None, None, item, None, ("",))


def _first(values: dict[Any, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if values.get(name) is not None), None)


def checked_spans(row: SourceRow, spans: Iterable[RawSpan]) -> tuple[GivenSpan, ...]:
    return tuple(_checked_span(row, number, span) for number, span in enumerate(spans))


def _checked_span(row: SourceRow, number: int, span: RawSpan) -> GivenSpan:
    """Returns a span whose offsets are integers. Raises BadRowError if it is invalid."""
    name = f"span {number}"
    if span.unused == ("",):
        raise row.error(f"{name} is not an object with start, end and label, nor a list of these")
    start, end = (int(at) if isinstance(at, float) and at.is_integer() else at for at in (span.start, span.end))
    if not (type(start) is int and type(end) is int):
        raise row.error(f"{name} is from {start!r} to {end!r}, which are not both integers")
    label = span.label[0] if isinstance(span.label, list) and span.label else span.label
    if not isinstance(label, str) or not row.valid_text(label, "label").strip() or label == OUTSIDE:
        raise row.error(f"{name} has the label {label!r}, which is not an entity name")
    text = span.text if isinstance(span.text, str) and span.text.strip() else None
    return GivenSpan(start, end, label, text)


# Label Studio


def is_label_studio(row: Row, columns: Columns) -> bool:
    """Returns whether a row is a task of Label Studio's JSON export."""
    return isinstance(row.get("data"), dict) and any(name in row for name in (*LABEL_STUDIO_LISTS, "predictions"))


def label_studio_text(row: SourceRow) -> str:
    """Returns the text of a task: `text`, or the longest of the strings in `data`."""
    data = row.value["data"]
    texts = sorted((value for value in data.values() if isinstance(value, str)), key=len)
    text = data["text"] if isinstance(data.get("text"), str) else next(reversed(texts), None)
    if text is None or not text.strip():
        raise row.error(f"its data have no text, only {column_names(data) or 'no columns'}")
    return row.valid_text(text, "data")


def label_studio_task(row: SourceRow, columns: Columns) -> SpannedText:
    """Reads the first annotation of a task, or the one that is marked as ground truth.

    Raises LeftOutError if the task has no annotation that was not canceled.
    """
    text, done = label_studio_text(row), _annotations(row.value)
    if not done:
        raise LeftOutError(row.where, "without an annotation")
    return SpannedText(
        row.where, text, checked_spans(row, [span for item in _results(done[0]) for span in span_items(item)])
    )


def _annotations(row: Row) -> list[Row]:
    """Returns the annotations of a task that were not canceled, the ground truth first."""
    done = [one for one in _given_annotations(row) if not _is_canceled(one)]
    return sorted(done, key=lambda one: one.get("ground_truth") is not True)


def _given_annotations(row: Row) -> list[Row]:
    given: Any = next((row[name] for name in LABEL_STUDIO_LISTS if isinstance(row.get(name), list)), ())
    return [one for one in given if isinstance(one, dict)]


def _is_canceled(annotation: Row) -> bool:
    return any(annotation.get(key) is True for key in ("was_cancelled", "skipped"))


def _results(annotation: Row) -> Iterator[Row]:
    """Yields the values of an annotation's results that are spans."""
    results = annotation.get("result")
    for result in results if isinstance(results, list) else ():
        value = result.get("value") if isinstance(result, dict) else None
        if isinstance(value, dict) and _first(value, _STARTS) is not None:
            places = value.get("globalOffsets")  # in HTML, other offsets are relative to an element
            yield {**value, **places, "globalOffsets": None} if isinstance(places, dict) else value


def unused_of_label_studio(row: Row, columns: Columns) -> Iterator[str]:
    """Names what a task has but its first annotation's spans do not use."""
    done = _annotations(row)
    if len(done) > 1:
        yield "further annotations"
    if any(map(_is_canceled, _given_annotations(row))):
        yield "canceled annotations"
    if not is_empty(row.get("predictions")):
        yield "predictions"
    results = done[0].get("result") if done else None
    for result in results if isinstance(results, list) else ():
        value = result.get("value") if isinstance(result, dict) else None
        if not isinstance(value, dict) or _first(value, _STARTS) is None:
            kind = result.get("type") if isinstance(result, dict) else None
            yield f"{kind or 'a result without a span'} in an annotation"
    yield from dict.fromkeys(key for item in (_results(done[0]) if done else ()) for span in span_items(item)
                             for key in span.unused)  # fmt: skip
    texts = [name for name, value in row["data"].items() if isinstance(value, str)]
    used = "text" if "text" in texts else max(texts, key=lambda name: len(row["data"][name]), default=None)
    yield from (f"{name} in data" for name, value in row["data"].items() if name != used and not is_empty(value))
    yield from unused_columns(row, ("data", *LABEL_STUDIO_LISTS, "predictions"), columns)
