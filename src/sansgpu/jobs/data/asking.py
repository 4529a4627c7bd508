"""Prompts that let a chat model ask about a passage and answer, and the rows that are made of its replies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_ASK = (
    "{passage}\n\nWrite one short question that this text answers. Name the subject, so that the question is "
    "understood without the text."
)
_QUOTE = "What is the answer? Copy only the few words of the text that answer the question."
_ANSWER = "Answer the question in one full sentence, with facts of the text only."
# Two rounds before the passage show small models what a reply looks like: a text, question, quote and full answer.
_EXAMPLES = (
    ("Marie Curie was born in Warsaw in 1867. In 1903 she received the Nobel Prize in Physics together with her "
     "husband Pierre and Henri Becquerel, and in 1911 a second one, in chemistry.",
     "In which year did Marie Curie receive her first Nobel Prize?", "1903",
     "Marie Curie received her first Nobel Prize, in physics, in 1903."),
    ("Sourdough rises without added yeast. The dough is fermented by wild yeasts and lactic acid bacteria, which also "
     "give the bread its sour taste and keep it fresh for longer.",
     "What gives sourdough bread its sour taste?", "wild yeasts and lactic acid bacteria",
     "The wild yeasts and lactic acid bacteria in the dough give sourdough bread its sour taste."),
)  # fmt: skip
MIN_QUESTION_WORDS = 3
MAX_QUESTION_CHARS = 300
QUESTION_MARKS = ("?", "\uff1f", "\u061f", "\u037e")  # also in Chinese, Arabic and Greek
# Words of questions that are about any text, such as "What is the answer to this question?"
_GENERIC = frozenset(
    {"what", "when", "where", "which", "who", "why", "how", "that", "this", "the", "and", "are", "was", "did", "does",
     "can", "you", "for", "have", "with", "from", "answer", "question", "text"}
)  # fmt: skip
_LABEL = re.compile(r"^(?:\W*(?:question|q)\s*\d*\s*[:.]|\s*\d+[.)]|\s*[-*])\s*", re.IGNORECASE)
_OF_TEXT = re.compile(r"\b(?:the|this) (?:text|passage|paragraph|excerpt|article|document)\b", re.IGNORECASE)

NO_QUESTION = "replies that are no question"
CUT_OFF = "answers that do not end"
NOT_NEW = "answers that their question contains"
OF_TEXT = "questions about the text instead of its subject"
UNRELATED = "questions without a word of their passage"
REPEATED = "repeated questions"


@dataclass(frozen=True)
class Reply:
    """A question about a passage, and its answer with the start in the passage if it is a quote.

    `left_out` is the reason why they are not used.
    """

    question: str = ""
    answer: str = ""
    start: int | None = None
    left_out: str | None = None


def conversation(passage: str, question: str | None, quotes: bool) -> list[dict[str, str]]:
    """Returns the messages that ask for a question about a passage or, if `question` is given, for its answer.

    The answer is to be a quote from the passage if `quotes`. The second conversation begins with the first.
    """
    last = _QUOTE if quotes else _ANSWER
    turns = [turn for text, asked, quote, answer in _EXAMPLES
             for turn in (_ASK.format(passage=text), asked, last, quote if quotes else answer)]  # fmt: skip
    turns += [_ASK.format(passage=passage), *([question, last] if question is not None else [])]
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


def question_in(reply: str) -> str | None:
    """Returns the question of a reply, without labels and quotes; None if the reply is no question."""
    for line in reply.strip().splitlines():
        question = " ".join(_LABEL.sub("", line).strip(" \"'*_“”").split())
        if not question.endswith(QUESTION_MARKS):
            continue
        is_short = len(question.split()) < MIN_QUESTION_WORDS and question.isascii()
        return None if is_short or len(question) > MAX_QUESTION_CHARS else question
    return None


def judged(passage: str, question: str, answer: str, start: int | None) -> Reply:
    """Returns a question with its answer, and whether they are of use."""
    reason = None
    if not answer:
        reason = CUT_OFF
    elif not (_names(question) & _names(passage)):
        reason = UNRELATED
    elif _plain(answer) in _plain(question):
        reason = NOT_NEW
    elif start is None and _OF_TEXT.search(question):
        reason = OF_TEXT  # the question is learned without the text
    return Reply(question, answer, start, reason)


def _names(text: str) -> set[str]:
    """Returns the words of a text that may be about its subject; of Chinese and Japanese, the characters."""
    words = re.findall(r"[^\W\u3000-\U0010ffff]{3,}|(?=\w)[\u3000-\U0010ffff]", text.lower())
    return set(words) - _GENERIC


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


@dataclass
class Kept:
    """Counts the replies that are used, by passage, and those that are left out, by reason."""

    questions: int = 0
    passages: set[int] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)

    def among(self, replies: Iterable[tuple[int, Reply]]) -> Iterator[tuple[int, Reply]]:
        """Yields the usable replies with the numbers of their passages, without repeated questions."""
        seen: set[str] = set()
        for passage, reply in replies:
            question = _plain(reply.question)
            reason = reply.left_out or (REPEATED if question in seen else None)
            if reason is not None:
                self.left_out[reason] += 1
                continue
            seen.add(question)
            self.questions += 1
            self.passages.add(passage)
            yield passage, reply


def row_of(identifier: str, title: str, context: str, reply: Reply) -> dict[str, Any]:
    """Returns a row in SQuAD's form for a quoted answer, otherwise a conversation, which task sft learns."""
    if reply.start is None:
        turns = [("user", reply.question), ("assistant", reply.answer)]
        return {"id": identifier, "messages": [{"role": role, "content": content} for role, content in turns]}
    answers = {"text": [reply.answer], "answer_start": [reply.start]}
    return {"id": identifier, "title": title, "question": reply.question, "context": context, "answers": answers}
