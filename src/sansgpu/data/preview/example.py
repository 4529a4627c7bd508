"""Turns typed rows into examples that can be shown: named parts of text, in which the targets are marked.

`parts_of` has one function for each kind of typed row, and needs no tokenizer: all text of an answer counts as learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sansgpu.data.conll import OUTSIDE
from sansgpu.data.forms.chats import Conversation, Prompt
from sansgpu.data.forms.graphs import EntityText, Fact, GraphDocument
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.forms.questions import Question
from sansgpu.data.forms.turns import Message
from sansgpu.data.forms.words import TaggedText

# Fields of a Conversation that have parts of their own, or only say how it is read. Any other field is shown, too.
_CONVERSATION_FIELDS = {"where", "turns", "first", "plain", "text", "parse_special", "unlearned"}
_SHOWN_FIELDS = tuple(field.name for field in fields(Conversation) if field.name not in _CONVERSATION_FIELDS)


@dataclass(frozen=True)
class TextSegment:
    """A piece of text. `learned`: the model learns to produce it; `label`: name of a marked span."""

    text: str
    learned: bool = False
    special: bool = False  # a special token
    label: str = ""


@dataclass(frozen=True)
class ExamplePart:
    """One text of an example, such as a turn, or with `is_target` what the model predicts about the texts."""

    name: str
    segments: tuple[TextSegment, ...]
    is_target: bool = False
    tokens: int | None = None  # without a tokenizer: None
    learned_tokens: int | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


Parts = tuple[ExamplePart, ...]


def parts_of(typed: Any) -> Parts:
    """Returns the parts of a typed row."""
    return tuple(_PARTS.get(type(typed), _any_row)(typed))


def text_in(parts: Parts) -> str:
    """Returns all text of an example, without what is predicted about it."""
    return "\n".join(part.text for part in parts if not part.is_target)


def learned_length(parts: Parts) -> int:
    """Returns the number of characters that the model learns to produce."""
    segments = (segment for part in parts if not part.is_target for segment in part.segments)
    return sum(len(segment.text) for segment in segments if segment.learned and not segment.label)


def plain(name: str, text: str, learned: bool = False) -> ExamplePart:
    return ExamplePart(name, (TextSegment(text, learned),))


def target(name: str, text: str) -> ExamplePart:
    """Returns a part with what the model predicts."""
    return ExamplePart(name, (TextSegment(text, True),), is_target=True)


def _any_row(typed: Any) -> Iterator[ExamplePart]:
    """Yields a row of a task outside the package."""
    yield plain("row", str(typed))


def _document(text: str) -> Iterator[ExamplePart]:
    yield plain("text", text, learned=True)


def _conversation(row: Conversation) -> Iterator[ExamplePart]:
    yield from _further_fields(row)
    if row.text is not None:
        yield plain("text", row.text, learned=True)
    learned = {*row.learned_turns}
    for number, turn in enumerate(row.turns):
        yield _turn(turn, number in learned)


def _further_fields(row: Conversation) -> Iterator[ExamplePart]:
    for name in _SHOWN_FIELDS:
        if value := getattr(row, name):
            yield plain(name, value if isinstance(value, str) else _json(value))


def _turn(turn: Message, learned: bool) -> ExamplePart:
    return plain(str(turn["role"]), _turn_text(turn), learned)


def _turn_text(turn: Message) -> str:
    others = {name: value for name, value in turn.items() if name not in ("role", "content")}
    content = str(turn["content"])
    return content + (f"{' ' if content else ''}{_json(others)}" if others else "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _prompt(row: Prompt) -> Iterator[ExamplePart]:
    if row.turns:
        yield from (_turn(turn, False) for turn in row.turns)
    else:
        yield plain("text", row.text)
    used = {"conversations", "system"}
    if columns := {name: value for name, value in row.columns.items() if name not in used and value is not None}:
        yield target("for the reward", _json(columns))


def _preference(row: PreferenceRow) -> Iterator[ExamplePart]:
    asked = row.conversations[0]
    yield from (_turn(turn, False) for turn in asked.turns[: asked.first])
    names = ("chosen", "rejected") if row.label is None else ("good answer", "bad answer")
    for conversation, is_good in row.rated:
        name, answer = names[not is_good], conversation.turns[conversation.first :]
        if len(answer) == 1:
            yield plain(name, _turn_text(answer[0]), learned=True)
            continue
        learned = {*conversation.learned_turns}
        for number, turn in enumerate(answer, conversation.first):
            part = _turn(turn, number in learned)
            yield replace(part, name=f"{name}, {part.name}")


def _labeled(row: LabeledText) -> Iterator[ExamplePart]:
    yield plain("text", row.text)
    if row.pair is not None:
        yield plain("text_pair", row.pair)
    if row.label is not None:
        yield target("label", ", ".join(row.labels))


def _group(row: TextRow) -> Iterator[ExamplePart]:
    names = {"pairs": ("anchor", "positive"), "scores": ("text1", "text2"), "labels": ("text",)}[row.kind]
    for number, text in enumerate(row.texts):
        yield plain(names[number] if number < len(names) else "negative", text)
    if row.score is not None:
        yield target("score", f"{row.score:g}")
    if row.label is not None:
        yield target("label", row.label)


def _tagged(row: TaggedText) -> Iterator[ExamplePart]:
    yield ExamplePart("text", tuple(marked(row.text, tagged_spans(row))))


def tagged_spans(row: TaggedText) -> list[tuple[int, int, str]]:
    """Returns (start character, end character, label) of each span that the IOB2 tags of a text describe."""
    spans: list[tuple[int, int, str]] = []
    continues = ""
    for number, tag in enumerate(row.tags):
        kind, _, label = tag.partition("-")
        if tag == OUTSIDE:
            continues = ""
            continue
        end = int(row.ends[number])
        if kind == "I" and continues == label and spans:
            spans[-1] = (spans[-1][0], end, label)
        else:
            spans.append((int(row.starts[number]), end, label or tag))
        continues = label or tag
    return spans


def marked(text: str, spans: Iterable[tuple[int, int, str]], learned: bool = True) -> Iterator[TextSegment]:
    """Yields a text in segments, of which `spans` have labels. Spans do not overlap."""
    last = 0
    for start, end, label in sorted(spans):
        if start > last:
            yield TextSegment(text[last:start])
        yield TextSegment(text[start:end], learned, label=label)
        last = end
    if last < len(text):
        yield TextSegment(text[last:])


def _question(row: Question) -> Iterator[ExamplePart]:
    yield plain("question", row.question)
    yield ExamplePart("context", tuple(marked(row.context, answer_span(row))))
    if row.impossible:
        yield target("answer", "(none: the question is impossible)")


def answer_span(row: Question) -> list[tuple[int, int, str]]:
    """Returns the span of the first answer, if any."""
    return [(start, start + len(text), "answer") for start, text in row.answers[:1]]


def _graph_text(row: GraphDocument) -> Iterator[ExamplePart]:
    yield plain("text", row.text)
    if row.triples:
        yield target("triples", "; ".join(" | ".join((one.head, one.relation, one.tail)) for one in row.triples))
    if row.entities:
        yield target("entities", ", ".join(row.entities))


def _fact(row: Fact) -> Iterator[ExamplePart]:
    yield plain("head", row.head)
    yield plain("relation", row.relation)
    yield plain("tail", row.tail, learned=True)
    if row.qualifiers:
        yield plain("qualifiers", "; ".join(f"{name}: {value}" for name, value in row.qualifiers))


def _entity(row: EntityText) -> Iterator[ExamplePart]:
    yield plain("name", row.name)
    yield plain("text", row.document.text)


_PARTS: dict[type, Callable[[Any], Iterator[ExamplePart]]] = {
    str: _document,
    Conversation: _conversation,
    Prompt: _prompt,
    PreferenceRow: _preference,
    LabeledText: _labeled,
    TextRow: _group,
    TaggedText: _tagged,
    Question: _question,
    GraphDocument: _graph_text,
    Fact: _fact,
    EntityText: _entity,
}


def answers_in(typed: Any, parts: Sequence[ExamplePart]) -> list[str]:
    """Returns the answers of a row that are learned, if it is a conversation, a preference or a question."""
    if isinstance(typed, Question):
        return [text for _, text in typed.answers[:1]]
    if isinstance(typed, PreferenceRow) or (isinstance(typed, Conversation) and typed.text is None):
        return ["".join(s.text for s in part.segments) for part in parts if any(s.learned for s in part.segments)]
    return []
