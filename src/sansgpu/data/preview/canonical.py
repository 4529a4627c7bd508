"""Writes typed rows in one form for each kind of row, as `sansgpu data --write` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sansgpu.data.forms.chats import Conversation
from sansgpu.data.forms.form import Forms
from sansgpu.data.forms.graphs import EntityText, Fact, GraphDocument, Triple
from sansgpu.data.forms.labels import LabeledText
from sansgpu.data.forms.offsets import Offsets, SpannedText
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.forms.preferences import PreferenceRow
from sansgpu.data.forms.questions import Question
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.preview.example import tagged_spans
from sansgpu.data.rows import BadRowError, SourceRow

# Fields that say where a row was, or what was corrected in it, which is not corrected again.
_NOT_CONTENT = ("where", "moved_spans", "dropped_spans", "given_words")


def canonical_row(forms: Forms[Any], row: SourceRow, typed: Any) -> Any:
    """Returns the value of a row in the canonical form, from which its task reads an equal typed row.

    A row for which the canonical form has no place keeps its own columns.
    """
    for candidate in _CANDIDATES.get(type(typed), _no_candidates)(typed):
        try:
            if same_content(forms.read(SourceRow(row.where, candidate)), typed):
                return candidate
        except BadRowError:
            continue
    return row.value


def same_content(one: Any, other: Any) -> bool:
    """Returns whether two typed rows are equal, wherever they come from."""
    one, other = _tagged_words(one), _tagged_words(other)
    return type(one) is type(other) and bool(_content(one) == _content(other))


def _tagged_words(typed: Any) -> Any:
    """Returns the words of a text with spans, whose offsets count characters in the canonical form."""
    return typed.tagged(Offsets()) if isinstance(typed, SpannedText) else typed


def _content(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value) if field.name not in _NOT_CONTENT)
        return {name: _content(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_content(item) for item in value] if isinstance(value, tuple) else value


def _no_candidates(typed: Any) -> Iterator[dict[str, Any]]:
    return iter(())


def _text(text: str) -> Iterator[dict[str, Any]]:
    yield {"text": text}


def _conversation(row: Conversation) -> Iterator[dict[str, Any]]:
    if row.text is not None:
        yield {"text": row.text}
    if row.plain is not None:
        yield {"prompt": row.plain[0], "completion": row.plain[1]}
    yield {"messages": list(row.turns)}
    yield {"prompt": list(row.turns[: row.first]), "completion": list(row.turns[row.first :])}


def _preference(row: PreferenceRow) -> Iterator[dict[str, Any]]:
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


def _labeled(row: LabeledText) -> Iterator[dict[str, Any]]:
    pair = {} if row.pair is None else {"text_pair": row.pair}
    yield {"text": row.text, **pair, "label": row.label}


def _group(row: TextRow) -> Iterator[dict[str, Any]]:
    if row.kind == "scores":
        yield {"text1": row.texts[0], "text2": row.texts[1], "score": row.score}
    elif row.kind == "labels":
        yield {"text": row.texts[0], "label": row.label}
    else:
        anchor, positive, *negatives = row.texts
        negative = {} if not negatives else {"negative": negatives[0] if len(negatives) == 1 else negatives}
        yield {"anchor": anchor, "positive": positive, **negative}


def _tagged(row: TaggedText) -> Iterator[dict[str, Any]]:
    spans = [{"start": start, "end": end, "label": label} for start, end, label in tagged_spans(row)]
    yield {"text": row.text, "spans": spans}
    yield {"tokens": [row.word(number) for number in range(len(row.starts))], "tags": list(row.tags)}


def _question(row: Question) -> Iterator[dict[str, Any]]:
    starts, texts = [start for start, _ in row.answers], [text for _, text in row.answers]
    answers = {"text": texts, "answer_start": starts}
    yield {"id": row.id, "question": row.question, "context": row.context, "answers": answers}


def _graph_text(row: GraphDocument) -> Iterator[dict[str, Any]]:
    triples = {"triples": [_triple(one) for one in row.triples]} if row.triples else {}
    entities = {"entities": list(row.entities)} if row.entities else {}
    yield {"text": row.text, **triples, **entities}
    yield {"id": row.id, "text": row.text, **triples, **entities}


def _triple(triple: Triple) -> dict[str, Any]:
    values: Mapping[str, Any] = triple._asdict()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}


def _fact(row: Fact) -> Iterator[dict[str, Any]]:
    qualifiers = {"qualifiers": [{name: value} for name, value in row.qualifiers]} if row.qualifiers else {}
    yield {"head": row.head, "relation": row.relation, "tail": row.tail, **qualifiers}


def _entity(row: EntityText) -> Iterator[dict[str, Any]]:
    yield {"id": row.document.id, "name": row.name, "text": row.document.text}


_CANDIDATES: dict[type, Callable[[Any], Iterator[dict[str, Any]]]] = {
    str: _text,
    Conversation: _conversation,
    PreferenceRow: _preference,
    LabeledText: _labeled,
    TextRow: _group,
    TaggedText: _tagged,
    Question: _question,
    GraphDocument: _graph_text,
    Fact: _fact,
    EntityText: _entity,
}
