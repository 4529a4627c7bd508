"""The data of extractive question answering: questions, tokenized into windows.

A window is the question and a part of its context, which overlaps with the next part. Windows and labels follow
transformers' examples/pytorch/question-answering/run_qa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sansgpu.config.schema import Config
from sansgpu.data.forms.questions import Question
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import BadRowError
from sansgpu.data.sequences import PackedSequences, Window, WindowedTexts, encoded_windows, require_overlap_fits
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.fine_tuning import longest_example

BATCH = 1000  # questions per call of the tokenizer, which runs in parallel


@dataclass(frozen=True, eq=False)
class QuestionWindow(Window):
    """A window with a question and part of its context; `text` is the index of the question.

    `start` and `end` are the positions of the answer's first and last token, or both `cls` if the window does not
    contain the complete answer. `offsets` are characters [start, stop) in the context.
    """

    start: int
    end: int
    cls: int
    offsets: np.ndarray  # (T, 2) int32; -1, -1 for tokens outside the context


@tokenizer_errors()
def make_windows(
    questions: list[Question], tokenizer: Any, max_length: int, doc_stride: int, bad_rows: RowReport
) -> tuple[list[Question], list[QuestionWindow]]:
    """Tokenizes questions in order into windows of at most `max_length` tokens that overlap by `doc_stride` tokens.

    `tokenizer` is a fast tokenizer of transformers; if it pads on the left, the context comes before the question. A
    question that leaves no room for its context is a bad row. Returns the other questions and their windows. Raises
    ConfigError if the overlap leaves no room for any question.
    """
    room = require_overlap_fits(tokenizer, max_length, doc_stride, pair=True)
    kept: list[Question] = []
    windows: list[QuestionWindow] = []
    for first in range(0, len(questions), BATCH):
        batch = _with_room(questions[first : first + BATCH], tokenizer, room, max_length, doc_stride, bad_rows)
        windows += _batch_windows(batch, len(kept), tokenizer, max_length, doc_stride) if batch else []
        kept += batch
    return kept, windows


def _lengths(texts: list[str], tokenizer: Any) -> list[int]:
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    return [len(ids) for ids in encoded["input_ids"]]


def _with_room(
    questions: list[Question], tokenizer: Any, room: int, max_length: int, doc_stride: int, bad_rows: RowReport
) -> list[Question]:
    """Returns the questions that fit. For others, `tokenizers` would panic or raise an error without their location."""

    def fitting(measured: tuple[Question, int]) -> Question:
        question, length = measured
        left = room - length
        if left > doc_stride or _lengths([question.context], tokenizer)[0] <= left:
            return question  # the context fits, or can be split
        if left < 1:
            raise BadRowError(
                f"question {question.id} has {length} tokens, which leaves no room for its context in a window of "
                f"data.max_length {max_length}; raise data.max_length or remove the question."
            )
        raise BadRowError(
            f"question {question.id} leaves {left} tokens for its context in a window of data.max_length {max_length}, "
            f"no more than data.doc_stride {doc_stride}; lower data.doc_stride or raise data.max_length."
        )

    lengths = _lengths([question.question.lstrip() for question in questions], tokenizer)
    return list(bad_rows.parsed(zip(questions, lengths, strict=True), fitting))


def _batch_windows(
    questions: list[Question], first: int, tokenizer: Any, max_length: int, doc_stride: int
) -> list[QuestionWindow]:
    """Tokenizes a batch of questions; `first` is the index of its first question."""
    context_second = tokenizer.padding_side == "right"
    question_texts, contexts = [q.question.lstrip() for q in questions], [q.context for q in questions]
    texts = (question_texts, contexts) if context_second else (contexts, question_texts)
    windows = []
    for window, offsets, sides in encoded_windows(texts, tokenizer, context_second, first, max_length, doc_stride):
        offsets[sides != int(context_second)] = -1
        cls = _cls_index(window.ids.tolist(), tokenizer)
        answer = _label(questions[window.text - first], offsets, cls)
        windows.append(QuestionWindow(window.text, window.ids, window.type_ids, *answer, cls, offsets))
    return windows


def _cls_index(ids: list[int], tokenizer: Any) -> int:
    """Returns the position of the token that is the target in windows without the answer."""
    for token in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if token is not None and token in ids:
            return ids.index(token)
    return 0


def _label(question: Question, offsets: np.ndarray, cls: int) -> tuple[int, int]:
    """Returns the positions of the first answer's first and last token, or `cls` twice if it is not all in the window.

    These are the first and last token that share a character with the answer. run_qa.py differs in two cases: if the
    answer is in the last token, its start is outside the context; if a character has several tokens, the end may
    precede the start.
    """
    places = np.flatnonzero(offsets[:, 0] >= 0)
    if question.impossible or not len(places):
        return cls, cls
    answer_start, text = question.answers[0]
    answer_stop = answer_start + len(text)
    begins, ends = offsets[places].T
    if begins[0] > answer_start or ends[-1] < answer_stop:
        return cls, cls
    start = int(np.searchsorted(ends, answer_start, side="right"))
    end = int(np.searchsorted(begins, answer_stop, side="left")) - 1
    return (int(places[start]), int(places[end])) if start <= end else (cls, cls)


@dataclass(frozen=True)
class TokenizedQuestions(WindowedTexts):
    """Questions with their tokenized windows, and the bad rows that were skipped."""

    questions: list[Question]
    windows: list[QuestionWindow]
    bad_rows: RowReport

    def batch(self, numbers: np.ndarray) -> PackedSequences:
        """Returns a batch of the windows `numbers`, with targets (B, 2): the start and end positions of the answer."""
        windows = [self.windows[number] for number in numbers]
        places = np.array([(window.start, window.end) for window in windows], np.int64).reshape(-1, 2)
        return self.packed(numbers, places)


@dataclass(frozen=True)
class QuestionCorpus(TokenizedCorpus[TokenizedQuestions]):
    """Questions and their windows for training and validation."""

    def preview(self) -> str | None:
        """Returns the text of the first window with its answer in brackets."""
        window = self.train.windows[0]
        parts = (window.ids[: window.start], window.ids[window.start : window.end + 1], window.ids[window.end + 1 :])
        before, answer, after = (self.tokenizer.decode(part) for part in parts)
        return f"{before} ⟦{answer}⟧ {after}"


def tokenize_questions(
    questions: list[Question], config: Config, tokenizer: Any, bad_rows: RowReport
) -> TokenizedQuestions:
    """Tokenizes questions into windows. Adds those that are too long to `bad_rows`."""
    longest = longest_example(config, tokenizer)
    kept, windows = make_windows(questions, tokenizer, longest, config.data.doc_stride, bad_rows)
    return TokenizedQuestions(kept, windows, bad_rows)
