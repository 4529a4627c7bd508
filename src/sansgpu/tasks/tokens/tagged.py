"""Reads texts with tagged words, converts their tags to one scheme, and finds the labels of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate
from sansgpu.data.forms.tags import TAGGED, TaggedText, iob2_tags
from sansgpu.data.row_report import RowReport
from sansgpu.data.rows import SourceRow
from sansgpu.tasks.tokens.spans import has_entities, labels_of, scheme_of, spans_of, tag_flaw


def read_tagged(rows: Iterable[SourceRow], bad_rows: RowReport) -> list[TaggedText]:
    """Reads texts with tags. If any tag follows an entity scheme, all others must, too."""
    texts = TAGGED.read_all(rows, bad_rows)
    entities = any(has_entities(text.tags) for text in texts)

    def in_scheme(text: TaggedText) -> TaggedText:
        if flaw := next(filter(None, (tag_flaw(tag, entities) for tag in text.tags)), None):
            raise text.error(flaw)
        return text

    return list(bad_rows.parsed(texts, in_scheme))


def in_iob2(texts: list[TaggedText], name: str, notes: list[str], always: bool = False) -> list[TaggedText]:
    """Converts IOB1 and BIOES tags, or any tags if `always`, to IOB2. Appends a message about changes to `notes`."""
    scheme = scheme_of(text.tags for text in texts)
    moved = sum(text.moved_spans for text in texts)
    if moved:
        notes.append(f"{name}: {moved:,} spans start or end inside a word and were extended to whole words.")
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
