"""Questions in SQuAD's format, whose answers are spans of a context: nested articles (v1.1, v2) and flat rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sansgpu.data.forms.form import Form, Forms, any_row
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow, is_text
from sansgpu.data.tables import Columns


@dataclass(frozen=True)
class Question:
    """A question about `context`. Answers are (start character, text) pairs; an `impossible` question has none."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    impossible: bool


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
        return question

    return list(bad_rows.parsed(QUESTIONS.single_rows(rows), unique))


def _article_questions(article: SourceRow) -> Iterator[SourceRow]:
    paragraphs = article.value["paragraphs"]
    if not isinstance(paragraphs, list):
        yield article._replace(problem=str(article.error("its paragraphs are not a list")))
        return
    for number, paragraph in enumerate(paragraphs, 1):
        place = SourceRow(f"{article.where}, paragraph {number}", paragraph)
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield place._replace(problem=str(place.error("it needs a list `qas` of questions")))
            continue
        for count, qa in enumerate(paragraph["qas"], 1):
            is_object = isinstance(qa, dict)
            name = qa.get("id") if is_object else None
            where = f"{place.where}, question {count}"
            where += f" (id {name})" if isinstance(name, (str, int)) and is_text(str(name)) else ""
            yield SourceRow(where, {**qa, "context": paragraph.get("context")} if is_object else qa)


def _question(row: SourceRow, columns: Columns) -> Question:
    question, context = row.required_text("question"), row.required_text("context")
    impossible = row.value.get("is_impossible")
    if impossible not in (None, True, False):
        raise row.error(f"is_impossible is {impossible!r} instead of true or false")
    if "answers" not in row.value and not impossible:
        raise row.error("it has no answers; write an empty list for a question without an answer")
    answers = tuple(_answer(row, context, text, start) for text, start in _given_answers(row))
    if impossible and answers:
        raise row.error("is_impossible is true, but there are answers")
    return Question(row.identifier(row.value) or row.where, question, context, answers, not answers)


def unanswered_question(row: SourceRow) -> Question:
    """Reads a row for prediction. Raises BadRowError if it has no question or no context."""
    return Question(row.where, row.required_text("question"), row.required_text("context"), (), impossible=True)


def _given_answers(row: SourceRow) -> list[tuple[Any, Any]]:
    """Returns (text, start) of each answer, without checking their types."""
    answers = row.value.get("answers")
    if answers is None:
        return []
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list):
            raise row.error("its answers lack the lists `text` and `answer_start`")
        if len(texts) != len(starts):
            raise row.error(f"its answers have {len(texts)} texts, but {len(starts)} starts")
        return list(zip(texts, starts, strict=True))
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise row.error("its answers are not a list of objects with `text` and `answer_start`")
    return [(answer.get("text"), answer.get("answer_start")) for answer in answers]


def _answer(row: SourceRow, context: str, text: Any, start: Any) -> tuple[int, str]:
    """Returns the answer's start and text after checking them against the context, ignoring surrounding white space."""
    if not isinstance(text, str) or not text.strip():
        raise row.error("an answer has no text")
    if not is_text(text):
        raise row.error("an answer contains an unpaired surrogate, which is not valid text")
    if not isinstance(start, int) or isinstance(start, bool):
        raise row.error(f"the answer {text!r} starts at {start!r}, which is not an integer")
    if start >= 0:
        if context.startswith(text, start):
            return start, text
        stripped_start = len(context) - len(context[start:].lstrip())
        if context.startswith(text.strip(), stripped_start):
            return stripped_start, text.strip()
    raise row.error(f"the answer {text!r} is not at character {start} of the context")


_QUESTION, _CONTEXT = "Where did Ada live?", "Ada lived in London."
_ANSWER = {"text": "London", "answer_start": 13}

QUESTIONS = Forms("a question and its context", (
    Form(("paragraphs",), _question,
         {"paragraphs": [{"context": _CONTEXT, "qas": [{"question": _QUESTION, "answers": [_ANSWER]}]}]},
         split=_article_questions),
    Form(("question", "context", "answers"), _question,
         {"question": _QUESTION, "context": _CONTEXT, "answers": {"text": ["London"], "answer_start": [13]}},
         ("id", "is_impossible", "title"), any_row),
))  # fmt: skip
