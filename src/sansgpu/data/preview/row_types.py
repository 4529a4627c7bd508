"""The types of rows that tasks read: how each is shown, and how it is written in its canonical form.

A new type of row is added to `ROW_TYPES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sansgpu.data.conll import OUTSIDE
from sansgpu.data.forms.chats import Conversation, Prompt
from sansgpu.data.forms.graphs import EntityText, Fact, GraphDocument, Triple
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.forms.questions import Question
from sansgpu.data.forms.turns import Message
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.preview.example import ExamplePart, Parts, marked, plain, target

# Fields of a Conversation that have parts of their own, or only say how it is read. Any other field is shown, too.
_CONVERSATION_FIELDS = {"where", "turns", "first", "plain", "text", "parse_special", "unlearned"}
_SHOWN_FIELDS = tuple(field.name for field in fields(Conversation) if field.name not in _CONVERSATION_FIELDS)


@dataclass(frozen=True)
class RowType:
    """How a type of row is shown and written.

    `parts` needs no tokenizer: all text of an answer counts as learned. `columns` yields the columns of canonical forms
    that may hold a row, the preferred form first.
    """

    parts: Callable[[Any], Iterator[ExamplePart]]
    columns: Callable[[Any], Iterator[dict[str, Any]]] = lambda row: iter(())
    is_one_input: bool = False  # True if a model reads all texts of a row together, False if one by one


def row_type(typed: Any) -> RowType:
    return ROW_TYPES.get(type(typed), RowType(_any_row))


def parts_of(typed: Any) -> Parts:
    """Returns the parts of a typed row."""
    return tuple(row_type(typed).parts(typed))


def answers_in(typed: Any, parts: Sequence[ExamplePart]) -> list[str]:
    """Returns the answers of a row that are learned, if it is a conversation, a preference or a question."""
    if isinstance(typed, Question):
        return [text for _, text in typed.answers[:1]]
    if isinstance(typed, PreferenceRow) or (isinstance(typed, Conversation) and typed.text is None):
        return ["".join(s.text for s in part.segments) for part in parts if any(s.learned for s in part.segments)]
    return []


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


def _question(row: Question) -> Iterator[ExamplePart]:
    yield plain("question", row.question)
    answer = [(start, start + len(text), "answer") for start, text in row.answers[:1]]
    yield ExamplePart("context", tuple(marked(row.context, answer)))
    if row.impossible:
        yield target("answer", "(none: the question is impossible)")


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


def _document_columns(text: str) -> Iterator[dict[str, Any]]:
    yield {"text": text}


def _conversation_columns(row: Conversation) -> Iterator[dict[str, Any]]:
    if row.text is not None:
        yield {"text": row.text}
    if row.plain is not None:
        yield {"prompt": row.plain[0], "completion": row.plain[1]}
    yield {"messages": list(row.turns)}
    yield {"prompt": list(row.turns[: row.first]), "completion": list(row.turns[row.first :])}


def _preference_columns(row: PreferenceRow) -> Iterator[dict[str, Any]]:
    first = row.conversations[0]
    prompt, answers = list(first.turns[: first.first]), [list(one.turns[one.first :]) for one in row.conversations]
    if row.label is not None:
        if first.plain is not None:
            yield {"prompt": first.plain[0], "completion": first.plain[1], "label": row.label}
        yield {"messages": [*prompt, *answers[0]], "label": row.label}
        yield {"prompt": prompt, "completion": answers[0], "label": row.label}
        return
    plains = [one.plain for one in row.conversations]
    if plains[0] is not None and plains[1] is not None:
        yield {"prompt": plains[0][0], "chosen": plains[0][1], "rejected": plains[1][1]}
    yield {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}


def _labeled_columns(row: LabeledText) -> Iterator[dict[str, Any]]:
    pair = {} if row.pair is None else {"text_pair": row.pair}
    yield {"text": row.text, **pair, "label": row.label}


def _group_columns(row: TextRow) -> Iterator[dict[str, Any]]:
    if row.kind == "scores":
        yield {"text1": row.texts[0], "text2": row.texts[1], "score": row.score}
    elif row.kind == "labels":
        yield {"text": row.texts[0], "label": row.label}
    else:
        anchor, positive, *negatives = row.texts
        negative = {} if not negatives else {"negative": negatives[0] if len(negatives) == 1 else negatives}
        yield {"anchor": anchor, "positive": positive, **negative}


def _tagged_columns(row: TaggedText) -> Iterator[dict[str, Any]]:
    spans = [{"start": start, "end": end, "label": label} for start, end, label in tagged_spans(row)]
    yield {"text": row.text, "spans": spans}
    yield {"tokens": [row.word(number) for number in range(len(row.starts))], "tags": list(row.tags)}


def _question_columns(row: Question) -> Iterator[dict[str, Any]]:
    starts, texts = [start for start, _ in row.answers], [text for _, text in row.answers]
    answers = {"text": texts, "answer_start": starts}
    yield {"id": row.id, "question": row.question, "context": row.context, "answers": answers}


def _graph_text_columns(row: GraphDocument) -> Iterator[dict[str, Any]]:
    triples = {"triples": [_triple(one) for one in row.triples]} if row.triples else {}
    entities = {"entities": list(row.entities)} if row.entities else {}
    yield {"text": row.text, **triples, **entities}
    yield {"id": row.id, "text": row.text, **triples, **entities}


def _triple(triple: Triple) -> dict[str, Any]:
    values: Mapping[str, Any] = triple._asdict()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}


def _fact_columns(row: Fact) -> Iterator[dict[str, Any]]:
    qualifiers = {"qualifiers": [{name: value} for name, value in row.qualifiers]} if row.qualifiers else {}
    yield {"head": row.head, "relation": row.relation, "tail": row.tail, **qualifiers}


def _entity_columns(row: EntityText) -> Iterator[dict[str, Any]]:
    yield {"id": row.document.id, "name": row.name, "text": row.document.text}


ROW_TYPES: dict[type, RowType] = {
    str: RowType(_document, _document_columns),
    Conversation: RowType(_conversation, _conversation_columns),
    Prompt: RowType(_prompt),
    PreferenceRow: RowType(_preference, _preference_columns),
    LabeledText: RowType(_labeled, _labeled_columns, is_one_input=True),
    TextRow: RowType(_group, _group_columns),
    TaggedText: RowType(_tagged, _tagged_columns, is_one_input=True),
    Question: RowType(_question, _question_columns, is_one_input=True),
    GraphDocument: RowType(_graph_text, _graph_text_columns),
    Fact: RowType(_fact, _fact_columns),
    EntityText: RowType(_entity, _entity_columns),
}
