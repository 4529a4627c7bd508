"""Rows -> questions about a context -> windows of tokens: the context in overlapping pieces, the question in each.

Windows and labels are those of transformers' examples/pytorch/question-answering/run_qa.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.data.files import Row, is_text, short
from sansgpu.machine.tokenizer_trial import tokenizer_errors

BATCH = 1000  # questions tokenised in one call, in parallel


@dataclass(frozen=True)
class Question:
    """A question about `context`; each answer is the character it starts at and its text, none where `impossible`."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]
    impossible: bool


@dataclass(frozen=True, eq=False)
class QuestionWindow:
    """A question and T tokens at most of it and its context.

    `question` counts in the list the windows were made of; `start` and `end` are the answer's first and last token,
    both `cls` where the window does not hold it whole; `offsets` are first and last + 1 character in the context.
    """

    question: int
    ids: np.ndarray  # (T,) int32
    type_ids: np.ndarray | None  # (T,) int8, where the tokenizer has them
    start: int
    end: int
    cls: int
    offsets: np.ndarray  # (T, 2) int32; -1, -1 for tokens that are not the context's


def read_questions(
    rows: Iterable[Row], on_bad_row: Literal["fail", "skip"], warn: Callable[[str], None]
) -> list[Question]:
    """Questions of SQuAD's nested articles (v1.1, v2) or of Hugging Face's flat columns, in order.

    A question with no answers is impossible; one without an id is named by its place. Raises ConfigError at the first
    bad row; with "skip" it is left out, and one warning tells how many were.
    """
    questions: list[Question] = []
    seen: set[str] = set()
    problems: list[str] = []
    for row in _single_questions(rows):
        try:
            question = _question(row)
            if question.id in seen:
                raise _bad(row, f"the id {question.id} was given before")
        except ConfigError as error:
            if on_bad_row == "fail":
                raise ConfigError(f"{str(error).removesuffix('.')}, or set data.on_bad_row to skip.") from None
            problems.append(str(error))
            continue
        seen.add(question.id)
        questions.append(question)
    if problems:
        warn(f"bad rows skipped: {len(problems)}; the first: {problems[0]}")
    return questions


def _bad(row: Row, problem: str) -> ConfigError:
    return ConfigError(f"{row.where}: {short(problem)}; mend or drop the row.")


def _single_questions(rows: Iterable[Row]) -> Iterator[Row]:
    """Nested articles as flat rows, one a question; flat rows as they are."""
    for row in rows:
        if row.problem is None and isinstance(row.value, dict) and "paragraphs" in row.value:
            yield from _article_questions(row)
        else:
            yield row


def _article_questions(article: Row) -> Iterator[Row]:
    paragraphs = article.value["paragraphs"]
    if not isinstance(paragraphs, list):
        yield article._replace(problem=str(_bad(article, "its paragraphs are no list")))
        return
    for number, paragraph in enumerate(paragraphs, 1):
        place = Row(f"{article.where}, paragraph {number}", paragraph)
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            yield place._replace(problem=str(_bad(place, "it is no object with a list `qas` of questions")))
            continue
        for count, asked in enumerate(paragraph["qas"], 1):
            sound = isinstance(asked, dict)
            named = sound and _is_id(asked.get("id"))
            where = f"{article.where}, question {asked['id']}" if named else f"{place.where}, question {count}"
            yield Row(where, {**asked, "context": paragraph.get("context")} if sound else asked)


def _is_id(given: Any) -> bool:
    return isinstance(given, (str, int)) and is_text(str(given))


def _question(row: Row) -> Question:
    """Raises ConfigError where the row holds no sound question."""
    if row.problem:
        raise ConfigError(row.problem)
    if not isinstance(row.value, dict):
        raise _bad(row, f"it is a {type(row.value).__name__}, not an object with a question and its context")
    question, context = _text(row, "question"), _text(row, "context")
    impossible = row.value.get("is_impossible")
    if impossible not in (None, True, False):
        raise _bad(row, f"is_impossible is {impossible!r}, not true or false")
    if "answers" not in row.value and not impossible:
        raise _bad(row, "no answers, where a question that has none needs an empty list")
    answers = tuple(_answer(row, context, text, start) for text, start in _given_answers(row))
    if impossible and answers:
        raise _bad(row, "is_impossible is true, and yet there are answers")
    return Question(_id(row), question, context, answers, not answers)


def _text(row: Row, key: str) -> str:
    text = row.value.get(key)
    if not isinstance(text, str) or not text.strip():
        raise _bad(row, f"no {key}")
    if not is_text(text):
        raise _bad(row, f"its {key} holds half a surrogate pair, which is no text")
    return text


def _id(row: Row) -> str:
    given = row.value.get("id")
    if given is None:
        return row.where
    if not _is_id(given):
        raise _bad(row, f"its id is {given!r}, not a text or a whole number")
    return str(given)


def _given_answers(row: Row) -> list[tuple[Any, Any]]:
    """(text, start) of each answer, of whatever type they are."""
    answers = row.value.get("answers")
    if answers is None:
        return []
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list):
            raise _bad(row, "its answers are no lists `text` and `answer_start`")
        if len(texts) != len(starts):
            raise _bad(row, f"its answers have {len(texts)} texts, but {len(starts)} starts")
        return list(zip(texts, starts, strict=True))
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise _bad(row, "its answers are no list of objects with `text` and `answer_start`")
    return [(answer.get("text"), answer.get("answer_start")) for answer in answers]


def _answer(row: Row, context: str, text: Any, start: Any) -> tuple[int, str]:
    """Where the answer starts and its text; white space at its ends may have moved."""
    if not isinstance(text, str) or not text.strip():
        raise _bad(row, "an answer without text")
    if not is_text(text):
        raise _bad(row, "an answer holds half a surrogate pair, which is no text")
    if not isinstance(start, int) or isinstance(start, bool):
        raise _bad(row, f"the answer {text!r} starts at {start!r}, which is no whole number")
    if start >= 0:
        if context.startswith(text, start):
            return start, text
        beside = len(context) - len(context[start:].lstrip())
        if context.startswith(text.strip(), beside):
            return beside, text.strip()
    raise _bad(row, f"the answer {text!r} does not stand at character {start} of the context")


@tokenizer_errors()
def make_windows(questions: list[Question], tokenizer: Any, max_length: int, doc_stride: int) -> list[QuestionWindow]:
    """Windows of at most `max_length` tokens for all questions, in order; those of one overlap by `doc_stride` tokens.

    `tokenizer` is a fast one of transformers'; one that pads on the left puts the context before the question. Raises
    ConfigError where a question and the overlap leave no room for more context.
    """
    room = max_length - int(tokenizer.num_special_tokens_to_add(pair=True))
    if doc_stride >= room:
        raise ConfigError(
            f"data.doc_stride {doc_stride} leaves no room in a window of data.max_length {max_length} tokens; "
            "lower data.doc_stride or raise data.max_length."
        )
    windows: list[QuestionWindow] = []
    for first in range(0, len(questions), BATCH):
        batch = questions[first : first + BATCH]
        _check_room(batch, tokenizer, room, max_length, doc_stride)
        windows += _batch_windows(batch, first, tokenizer, max_length, doc_stride)
    return windows


def _lengths(texts: list[str], tokenizer: Any) -> list[int]:
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return [len(ids) for ids in encoded["input_ids"]]


def _check_room(questions: list[Question], tokenizer: Any, room: int, max_length: int, doc_stride: int) -> None:
    """Foresee what `tokenizers` cannot cut into `room` tokens: it would name no question, or panic."""
    lengths = _lengths([question.question.lstrip() for question in questions], tokenizer)
    for question, length in zip(questions, lengths, strict=True):
        left = room - length
        if left > doc_stride or _lengths([question.context], tokenizer)[0] <= left:
            continue  # the context fits, or can be cut
        if left < 1:
            raise ConfigError(
                f"question {question.id} has {length} tokens, which leaves no room for its context in a window of "
                f"data.max_length {max_length}; raise data.max_length or drop the question."
            )
        raise ConfigError(
            f"question {question.id} leaves {left} tokens for its context in a window of data.max_length {max_length}, "
            f"no more than data.doc_stride {doc_stride}; lower data.doc_stride or raise data.max_length."
        )


def _batch_windows(
    questions: list[Question], first: int, tokenizer: Any, max_length: int, doc_stride: int
) -> list[QuestionWindow]:
    """Windows of questions whose first is number `first`."""
    context_second = tokenizer.padding_side == "right"
    asked, contexts = [q.question.lstrip() for q in questions], [q.context for q in questions]
    encoded = tokenizer(
        *((asked, contexts) if context_second else (contexts, asked)),
        truncation="only_second" if context_second else "only_first",
        max_length=max_length,
        stride=doc_stride,
        padding=False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    windows = []
    for number, owner in enumerate(encoded["overflow_to_sample_mapping"]):
        ids = encoded["input_ids"][number]
        types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else None
        offsets = np.array(encoded["offset_mapping"][number], np.int32).reshape(-1, 2)
        sides = np.array([-1 if side is None else side for side in encoded.sequence_ids(number)])
        offsets[sides != int(context_second)] = -1
        cls = _cls_index(ids, tokenizer)
        window = QuestionWindow(
            first + int(owner),
            np.array(ids, np.int32),
            None if types is None else np.array(types, np.int8),
            *_label(questions[owner], offsets, cls),
            cls,
            offsets,
        )
        windows.append(window)
    return windows


def _cls_index(ids: list[int], tokenizer: Any) -> int:
    """Where a window says that it holds no answer."""
    for token in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if token is not None and token in ids:
            return ids.index(token)
    return 0


def _label(question: Question, offsets: np.ndarray, cls: int) -> tuple[int, int]:
    """First and last token of the first answer, or `cls` twice where it is not wholly in the window.

    run_qa walks past the context from an answer in its last token, and within a character of several tokens it ends
    before it starts; here an answer has all tokens that share a character with it.
    """
    places = np.flatnonzero(offsets[:, 0] >= 0)
    if question.impossible or not len(places):
        return cls, cls
    begin, text = question.answers[0]
    stop = begin + len(text)
    begins, ends = offsets[places].T
    if begins[0] > begin or ends[-1] < stop:
        return cls, cls
    start = int(np.searchsorted(ends, begin, side="right"))
    end = int(np.searchsorted(begins, stop, side="left")) - 1
    return (int(places[start]), int(places[end])) if start <= end else (cls, cls)
