"""Reads texts with tagged words, converts their tags to one scheme, and finds the labels of a dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.conll import OUTSIDE, spelling_of
from sansgpu.data.forms.offsets import SpannedText, offsets_of
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.forms.words import TaggedText, iob2_tags
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.tasks.tokens.spans import labels_of, scheme_of, spans_of, tag_flaw

_PREFIXED = re.compile(r"[A-Z][-_.:].+")  # a tag that looks like one of an entity scheme


def read_tagged(
    rows: Iterable[SourceRow], bad_rows: RowReport, data: TaggedDataConfig, name: str, notes: list[str]
) -> list[TaggedText]:
    """Reads texts with tags. If any tag follows an entity scheme, all others must, too.

    What the offsets of spans count and how tags are spelled is decided once, for all rows. Appends a message about
    each decision to `notes`.
    """

    def note(message: str) -> None:
        notes.append(f"{name}: {message}")

    given = TAGGED.read_all(TAGGED.single_rows(rows), bad_rows)
    spanned = [text for text in given if isinstance(text, SpannedText)]
    offsets = offsets_of(spanned, data.span_offsets, note)
    tagged = bad_rows.parsed(given, lambda text: text.tagged(offsets) if isinstance(text, SpannedText) else text)
    texts = _named(list(tagged), data.labels, bad_rows, note)
    spelling = spelling_of(tag for text in texts for tag in text.tags)
    standard = {tag: (spelling and spelling.standard(tag)) or tag for text in texts for tag in text.tags}

    def in_scheme(text: TaggedText) -> TaggedText:
        tags = tuple(standard[tag] for tag in text.tags)
        if flaw := next(filter(None, (tag_flaw(tag, spelling is not None) for tag in tags)), None):
            raise text.error(flaw)
        return replace(text, tags=tags)

    if spelling is None and (odd := next(filter(_PREFIXED.fullmatch, standard), None)):
        note(f"tags such as {odd} have none of the prefixes B, I, E and S, so each word with one is a span of its own.")
    if changed := next((pair for pair in standard.items() if pair[0] != pair[1]), None):
        note(f"tags such as {changed[0]} are read as {changed[1]}.")
    return list(bad_rows.parsed(texts, in_scheme))


def _named(
    texts: list[TaggedText], labels: Sequence[str] | None, bad_rows: RowReport, note: Callable[[str], None]
) -> list[TaggedText]:
    """Replaces tags that are numbers by the names in `labels`. Without names, 0 is `O`."""
    if not any(text.has_numbers for text in texts):
        return texts
    names = labels if labels and not all(label == OUTSIDE or label.isdigit() for label in labels) else None
    if names is None:
        note(
            f"the tags are numbers without names, so 0 is read as {OUTSIDE}, and each word with a different number is "
            f"a span; set data.labels to their names in order, e.g. [{OUTSIDE}, B-PER, I-PER]."
        )
    else:
        named_numbers = ", ".join(f"{number} = {name}" for number, name in enumerate(names))
        note(f"the tags are numbers, which are read as data.labels in order: {truncate(named_numbers)}.")

    def named(text: TaggedText) -> TaggedText:
        if not text.has_numbers:
            return text
        if names is None:
            return replace(text, tags=tuple(OUTSIDE if tag == "0" else tag for tag in text.tags))
        if unknown := next((tag for tag in text.tags if int(tag) >= len(names)), None):
            raise text.error(f"its tag {unknown} has no name among the {len(names)} of data.labels")
        return replace(text, tags=tuple(names[int(tag)] for tag in text.tags))

    return list(bad_rows.parsed(texts, named))


def in_iob2(texts: list[TaggedText], name: str, notes: list[str], always: bool = False) -> list[TaggedText]:
    """Converts IOB1 and BIOES tags, or any tags if `always`, to IOB2. Appends a message about changes to `notes`."""
    scheme = scheme_of(text.tags for text in texts)
    if moved := sum(text.moved_spans for text in texts):
        notes.append(f"{name}: {moved:,} spans start or end inside a word and were extended to whole words.")
    if dropped := sum(text.dropped_spans for text in texts):
        notes.append(
            f"{name}: {counted(dropped, 'span')} left out, because a longer one overlaps or has the same word; the "
            "outermost are learned."
        )
    if scheme in ("IOB1", "BIOES"):
        notes.append(f"{name}: the tags are {scheme} and were converted to IOB2.")
    elif not (always and scheme == "IOB2"):
        return texts
    return [replace(text, tags=iob2_tags(spans_of(text.tags), len(text.tags))) for text in texts]


def require_labels(texts: Iterable[TaggedText], name: str) -> list[str]:
    """Returns the labels for the tags in the texts. Raises ConfigError if there is only one."""
    labels = labels_of(tag for text in texts for tag in text.tags)
    if len(labels) == 1:
        raise ConfigError(
            f"{name}: every word has the tag {labels[0]!r}, so there is nothing to learn; tag more words."
        )
    return labels


def with_targets(
    texts: list[TaggedText], labels: Sequence[str], bad_rows: RowReport
) -> tuple[list[TaggedText], list[np.ndarray]]:
    """Returns the texts whose tags are all in `labels`, and the label ids of their words, (W,) each."""
    numbers = {label: number for number, label in enumerate(labels)}

    def target(text: TaggedText) -> tuple[TaggedText, np.ndarray]:
        if unknown := next((tag for tag in text.tags if tag not in numbers), None):
            raise text.error(f"its tag {unknown!r} is not one of the model's labels ({truncate(', '.join(labels))})")
        return text, np.array([numbers[tag] for tag in text.tags], np.int64)

    found = list(bad_rows.parsed(texts, target))
    return [text for text, _ in found], [ids for _, ids in found]
