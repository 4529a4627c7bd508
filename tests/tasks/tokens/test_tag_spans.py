"""Spans and scores of tags are those of seqeval; other schemes convert to IOB2."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as some
from seqeval.metrics import classification_report
from seqeval.metrics.sequence_labeling import get_entities, precision_recall_fscore_support

from sansgpu.data.forms.words import iob2_tags
from sansgpu.tasks.tokens.spans import (
    Scheme,
    SpanCounts,
    has_entities,
    labels_of,
    scheme_of,
    scores,
    span_counts,
    spans_of,
)

TAGS = some.sampled_from(["O", *(f"{prefix}-{name}" for prefix in "BIES" for name in ("a", "b", "c-d"))])
SENTENCES = some.lists(some.lists(some.tuples(TAGS, TAGS), min_size=1, max_size=9), min_size=1, max_size=5)
TEXT = ["O", "B-a", "I-a", "B-a", "O", "B-b", "B-a"]
FORMS: dict[Scheme, list[str]] = {
    "IOB2": TEXT,
    "IOB1": ["O", "I-a", "I-a", "B-a", "O", "I-b", "I-a"],
    "BIOES": ["O", "B-a", "E-a", "S-a", "O", "S-b", "S-a"],
}


@given(some.lists(TAGS, max_size=12))
def test_spans_are_those_of_seqeval(tags: list[str]) -> None:
    assert [(span.label, span.start, span.stop - 1) for span in spans_of(tags)] == get_entities(tags)


@given(SENTENCES)
def test_scores_are_those_of_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    gold, predicted = ([[pair[side] for pair in sentence] for sentence in pairs] for side in (0, 1))
    found = [span_counts(spans_of(g), spans_of(p)) for g, p in zip(gold, predicted, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns about undefined scores
        expected = precision_recall_fscore_support(gold, predicted, average="micro")[:3]
        report = classification_report(gold, predicted, output_dict=True)
    assert list(scores(*_total(c for counts in found for c in counts.values())).values()) == pytest.approx(expected)
    for label in {label for counts in found for label in counts}:
        total = _total(counts[label] for counts in found if label in counts)
        theirs = report[label]
        named = [theirs["precision"], theirs["recall"], theirs["f1-score"]]
        assert list(scores(*total).values()) == pytest.approx(named)
        assert total.gold == theirs["support"]


def _total(counts: Iterable[SpanCounts]) -> SpanCounts:
    return SpanCounts(*map(sum, zip((0, 0, 0), *counts, strict=True)))


@given(some.lists(TAGS, max_size=12))
def test_tags_in_iob2_have_the_same_spans(tags: list[str]) -> None:
    converted = iob2_tags(spans_of(tags), len(tags))
    assert spans_of(converted) == spans_of(tags)
    assert iob2_tags(spans_of(converted), len(tags)) == converted


@pytest.mark.parametrize("scheme", FORMS)
def test_each_scheme_is_recognized_and_converted(scheme: Scheme) -> None:
    assert scheme_of([FORMS[scheme], ["O"]]) == scheme
    assert list(iob2_tags(spans_of(FORMS[scheme]), len(TEXT))) == TEXT


def test_an_error_in_iob2_does_not_make_it_iob1() -> None:
    assert scheme_of([TEXT, ["O", "I-a"]]) == "IOB2"


def test_plain_tags_are_no_entities_and_each_word_is_a_span() -> None:
    assert scheme_of([["NOUN", "VERB", "O"]]) == "plain"
    assert not has_entities(["NOUN", "-LRB-", "O"])
    assert spans_of(["NOUN", "NOUN", "O"], entities=False) == [(0, 1, "NOUN"), (1, 2, "NOUN")]


def test_labels_have_both_prefixes_of_every_entity() -> None:
    assert labels_of(["I-b", "B-a", "O", "B-c-d"]) == ["O", "B-a", "I-a", "B-b", "I-b", "B-c-d", "I-c-d"]
    assert labels_of(["VERB", "O", "ADJ"]) == ["O", "ADJ", "VERB"]
