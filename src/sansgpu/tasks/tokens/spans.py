"""Converts the tags of words to labeled spans and back, by the rules of conlleval and seqeval.

The tags of a dataset either all follow an entity scheme, with `O` or a prefix and a label such as `B-person`, or are
all plain, such as `NOUN`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from sansgpu.data.conll import OUTSIDE
from sansgpu.data.forms.words import WordSpan

_ENTITY_TAG = re.compile(r"[BIES]-.")
_NO_LABEL = re.compile(r"[BIES]-")
Scheme = Literal["plain", "IOB1", "IOB2", "BIOES"]


class SpanCounts(NamedTuple):
    """Numbers of correct, predicted and gold spans."""

    right: int
    predicted: int
    gold: int


def has_entities(tags: Iterable[str]) -> bool:
    """Returns whether any of the tags, or of a model's labels, follows an entity scheme."""
    return any(_ENTITY_TAG.match(tag) for tag in tags)


def tag_flaw(tag: str, entities: bool) -> str | None:
    """Returns what is wrong with a tag, or None. `entities`: the other tags follow an entity scheme."""
    if not tag:
        return "a tag is empty"
    if _NO_LABEL.fullmatch(tag):
        return f"its tag {tag!r} has no label, as in {tag}PER"
    if entities and tag != OUTSIDE and not has_entities((tag,)):
        return f"its tag {tag!r} is neither {OUTSIDE} nor starts with B-, I-, E- or S- like the other tags"
    return None


def spans_of(tags: Sequence[str], entities: bool = True) -> list[WordSpan]:
    """Returns the spans of a sentence. With plain tags, each word with a tag other than `O` is a span."""
    if not entities:
        return [WordSpan(n, n + 1, tag) for n, tag in enumerate(tags) if tag != OUTSIDE]
    spans: list[WordSpan] = []
    before = ""  # prefix of the previous word's tag
    for number, tag in enumerate(tags):
        prefix, _, label = tag.partition("-")
        continues = prefix in ("I", "E") and before in ("B", "I") and spans[-1].label == label
        if continues:
            spans[-1] = spans[-1]._replace(stop=number + 1)
        elif prefix != OUTSIDE:
            spans.append(WordSpan(number, number + 1, label))
        before = prefix
    return spans


def scheme_of(sentences: Iterable[Sequence[str]]) -> Scheme:
    """Determines the scheme of a dataset's tags.

    In IOB2 a span always begins with `B-`. In IOB1 it begins with `B-` only directly after a span with the same label,
    otherwise with `I-`.
    """
    seen: Counter[str] = Counter()
    for tags in sentences:
        for before, tag in zip((OUTSIDE, *tags), tags, strict=False):
            prefix, _, label = tag.partition("-")
            follows = before in (f"B-{label}", f"I-{label}")
            seen[prefix if prefix in ("E", "S") or follows or prefix == OUTSIDE else f"{prefix} begins"] += 1
            seen["entities"] += has_entities((tag,))
    if not seen["entities"]:
        return "plain"
    if seen["E"] or seen["S"]:
        return "BIOES"
    return "IOB1" if seen["I begins"] and not seen["B begins"] else "IOB2"


def labels_of(tags: Iterable[str]) -> list[str]:
    """Returns a model's labels for these tags: `O`, then `B-` and `I-` for each entity label; or the sorted tags."""
    found = set(tags)
    if not has_entities(found):
        return sorted(found, key=lambda tag: (tag != OUTSIDE, tag))
    names = sorted({tag.partition("-")[2] for tag in found if tag != OUTSIDE})
    return [OUTSIDE, *(f"{prefix}-{name}" for name in names for prefix in "BI")]


def span_counts(gold: Sequence[WordSpan], predicted: Sequence[WordSpan]) -> dict[str, SpanCounts]:
    """Returns the counts of a sentence by label. A span is correct if both its words and its label are."""
    right = set(gold) & set(predicted)
    by_part = [Counter(span.label for span in part) for part in (right, predicted, gold)]
    labels = sorted({label for counts in by_part for label in counts})
    return {label: SpanCounts(*(counts[label] for counts in by_part)) for label in labels}


def scores(right: float, predicted: float, gold: float) -> dict[str, float]:
    """Returns precision, recall and F1. They are 0 where the denominator is 0."""
    precision, recall = right / max(predicted, 1.0), right / max(gold, 1.0)
    return {"precision": precision, "recall": recall, "f1": 2 * right / max(predicted + gold, 1.0)}
