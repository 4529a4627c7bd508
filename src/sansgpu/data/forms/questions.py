"""Questions in SQuAD's format, whose answers are spans of a context: nested articles (v1.1, v2) and flat rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sansgpu.data.forms.cells import parsed_cell
from sansgpu.data.forms.form import Form, Forms, any_row, is_empty, unused_columns
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import Row, SourceRow, is_text
from sansgpu.data.tables import Columns

ANSWER_COLUMNS = ("answers", "answer", "answer_text")
START_COLUMNS = ("answer_start", "answer_starts")
QUESTION_COLUMNS = ("id", "question", "context", "is_impossible", "title")
_ANSWER_KEYS = ("text", *START_COLUMNS)
FOUND_BY_TEXT = "answers that are not at their offset, but occur once in the context, are learned there"
FOUND_BY_UNITS = "answers whose offsets count UTF-16 units or bytes, not characters, are learned at their place"


@dataclass(frozen=True)
class Question:
    """A question about `context`. Answers are (start character, text) pairs; an `impossible` question has none."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    impossible: bool
    remarks: tuple[str, ...] = field(default=(), compare=False)  # how answers were found that are not at their offset


def read_questions(rows: Iterable[SourceRow], bad_rows: RowReport) -> list[Question]:
    """Reads questions in order from SQuAD's nested articles (v1.1, v2) or from Hugging Face's flat rows.

    A question without answers is impossible. The location replaces a missing id.
    """
    seen: set[str] = set()

    def unique(row: SourceRow) -> Question:
        question = QUESTIONS.read(row, report=bad_rows)
        if question.id in seen:
            raise row.error(f"an earlier question has the same id {question.id}")
        seen.add(question.id)
        for remark in question.remarks:
            bad_rows.remark(remark)
        return question

    return list(bad_rows.parsed(QUESTIONS.single_rows(rows), unique))


_NESTED_KEYS = ("paragraphs", "qas", "id", "question", "context", "is_impossible", *ANSWER_COLUMNS, *START_COLUMNS)


def _article_questions(article: SourceRow) -> Iterator[SourceRow]:
    paragraphs = article.value["paragraphs"]
    if not isinstance(paragraphs, list):
        yield article._replace(problem=str(article.error("its paragraphs are not a list")))
        return
    of_article = {key: value for key, value in article.value.items() if key not in _NESTED_KEYS}
    for number, paragraph in enumerate(paragraphs, 1):
        place = SourceRow(f"{article.where}, paragraph {number}", paragraph)
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield place._replace(problem=str(place.error("it needs a list `qas` of questions")))
            continue
        shared = of_article | {key: value for key, value in paragraph.items() if key not in _NESTED_KEYS}
        for count, qa in enumerate(paragraph["qas"], 1):
            is_object = isinstance(qa, dict)
            name = qa.get("id") if is_object else None
            where = f"{place.where}, question {count}"
            where += f" (id {name})" if isinstance(name, (str, int)) and is_text(str(name)) else ""
            yield SourceRow(where, {**shared, **qa, "context": paragraph.get("context")} if is_object else qa)


def _question(row: SourceRow, columns: Columns) -> Question:
    question, context = row.required_text("question"), row.required_text("context")
    impossible = _impossible(row)
    if impossible is None and all(row.value.get(column) is None for column in ANSWER_COLUMNS):
        raise row.error("it has no answers; write an empty list for a question without an answer")
    given = _given_answers(row)
    if impossible and all(text in ("", None) for text, _ in given):
        given = []
    found = [_answer(row, context, text, start) for text, start in given]
    if impossible and found:
        raise row.error("is_impossible is true, but there are answers")
    if impossible is False and not found:
        raise row.error("is_impossible is false, but there are no answers")
    answers = tuple((start, text) for start, text, _ in found)
    remarks = tuple(dict.fromkeys(remark for _, _, remark in found if remark is not None))
    return Question(row.identifier(row.value) or row.where, question, context, answers, not answers, remarks)


def _impossible(row: SourceRow) -> bool | None:
    """Returns whether a row says that its question has no answer, or None if it says nothing."""
    value = row.value.get("is_impossible")
    if value is None or value in (True, False):
        return None if value is None else bool(value)
    if isinstance(value, str) and value.strip().lower() in ("", "true", "false"):  # a cell of a table
        return value.strip().lower() == "true" if value.strip() else None
    raise row.error(f"is_impossible is {value!r} instead of true or false")


def _unused(row: Row, columns: Columns) -> Iterator[str]:
    yield from unused_columns(row, (*QUESTION_COLUMNS, *ANSWER_COLUMNS, *START_COLUMNS), columns)
    column = next((column for column in ANSWER_COLUMNS if column in row), None)
    given = parsed_cell(row.get(column))
    keys = {key: None for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)
            for key, value in one.items() if key not in _ANSWER_KEYS and not is_empty(value)}  # fmt: skip
    yield from (f"{key} in {column}" for key in keys)


def unanswered_question(row: SourceRow) -> Question:
    """Reads a row for prediction. Raises BadRowError if it has no question or no context."""
    row = row._replace(value=QUESTIONS.with_usual_names(row.value))
    return Question(row.where, row.required_text("question"), row.required_text("context"), (), impossible=True)


def _given_answers(row: SourceRow) -> list[tuple[Any, Any]]:
    """Returns (text, start) of each answer, without checking their types. The start is None if the row has none."""
    column = next((column for column in ANSWER_COLUMNS if row.value.get(column) is not None), "answers")
    answers = parsed_cell(row.value.get(column))
    if answers is None or answers == "":
        return []
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), _start_of(answers)
        if isinstance(texts, str) and not isinstance(starts, list):
            return [(texts, starts)]
        if not isinstance(texts, list) or not isinstance(starts, list):
            raise row.error(f"its {column} lack the lists `text` and `answer_start`")
        return _with_starts(row, column, texts, starts)
    if isinstance(answers, list) and answers and all(isinstance(answer, dict) for answer in answers):
        return [(answer.get("text"), _start_of(answer)) for answer in answers]
    texts = answers if isinstance(answers, list) else [answers]
    if not all(isinstance(text, str) for text in texts):
        raise row.error(f"its {column} are not a text, a list of texts, or objects with `text` and `answer_start`")
    starts = parsed_cell(_start_of(row.value))
    return _with_starts(row, column, texts, starts if isinstance(starts, list) else [starts] * len(texts))


def _with_starts(row: SourceRow, column: str, texts: list[Any], starts: list[Any]) -> list[tuple[Any, Any]]:
    if len(texts) != len(starts):
        raise row.error(f"its {column} have {len(texts)} texts, but {len(starts)} starts")
    return list(zip(texts, starts, strict=True))


def _start_of(values: Row) -> Any:
    """Returns the first start column that is given; a cell of a table has it as text."""
    start = next((values[key] for key in START_COLUMNS if values.get(key) not in (None, "")), None)
    return int(start) if isinstance(start, str) and start.strip().isdecimal() else start


def _answer(row: SourceRow, context: str, text: Any, start: Any) -> tuple[int, str, str | None]:
    """Returns the answer's start and text, and a remark if it is not at the given character.

    Raises BadRowError if it is not clear where the answer is. White space around it does not matter.
    """
    if not isinstance(text, str) or not text.strip():
        raise row.error("an answer has no text")
    if not is_text(text):
        raise row.error("an answer contains an unpaired surrogate, which is not valid text")
    if start is not None and (not isinstance(start, int) or isinstance(start, bool)):
        raise row.error(f"the answer {text!r} starts at {start!r}, which is not an integer")
    if start is not None and start >= 0:
        if (found := _text_at(context, text, start)) is not None:
            return *found, None
        for units in ("utf-16-le", "utf-8"):
            place = _character_at(context, start, units)
            if place is not None and context.startswith(text, place):
                return place, text, FOUND_BY_UNITS
    places = _places(context, text.strip())
    if len(places) == 1:
        return places[0], text.strip(), None if start is None else FOUND_BY_TEXT
    here = "in the context" if start is None else f"at character {start} of the context"
    if not places:
        raise row.error(f"the answer {text!r} is not {here}{'' if start is None else ', nor anywhere else in it'}")
    missing = "has no answer_start" if start is None else f"is not {here}"
    raise row.error(
        f"the answer {text!r} {missing}, but is at {len(places)} places in it, so it is unclear which one is meant; "
        "write its answer_start"
    )


def _text_at(context: str, text: str, start: int) -> tuple[int, str] | None:
    """Returns the start and text of an answer at a character, if need be without white space around it."""
    if context.startswith(text, start):
        return start, text
    stripped_start = len(context) - len(context[start:].lstrip())
    return (stripped_start, text.strip()) if context.startswith(text.strip(), stripped_start) else None


def _character_at(context: str, start: int, encoding: str) -> int | None:
    """Returns the number of the character at UTF-16 unit or byte `start`; None if there is none."""
    if context.isascii():
        return None
    before = context.encode(encoding)[: start * (2 if encoding == "utf-16-le" else 1)]
    try:
        return len(before.decode(encoding))
    except UnicodeDecodeError:  # within a character
        return None


def _places(context: str, text: str) -> list[int]:
    """Returns the characters at which a text is in the context, but not within a longer word or number."""
    begin = r"(?<![A-Za-z0-9])" if re.match("[A-Za-z0-9]", text) else ""
    end = r"(?![A-Za-z0-9])" if re.search("[A-Za-z0-9]$", text) else ""
    return [match.start() for match in re.finditer(f"{begin}(?={re.escape(text)}{end})", context)]


_QUESTION, _CONTEXT = "Where did Ada live?", "Ada lived in London."
_ANSWER = {"text": "London", "answer_start": 13}

QUESTIONS = Forms("a question and its context", (
    Form(("paragraphs",), _question,
         {"paragraphs": [{"context": _CONTEXT, "qas": [{"question": _QUESTION, "answers": [_ANSWER]}]}]},
         split=_article_questions),
    Form(("question", "context", "answers"), _question,
         {"question": _QUESTION, "context": _CONTEXT, "answers": {"text": ["London"], "answer_start": [13]}},
         ("id", "is_impossible", "title"), any_row, unused=_unused),
), other_names=(*ANSWER_COLUMNS, *START_COLUMNS))  # fmt: skip
