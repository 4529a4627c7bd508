"""Finds what in labels is likely to be a mistake, or makes learning them harder, and describes it."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.labels import LabeledText
from sansgpu.tasks.classify.labels import Labels

RARE = 0.05  # share of the rows below which a label may be called rare
RARE_OF_EVEN = 1 / 3  # ... if it also has less than this part of the rows that it would have if all were equal
MIN_ROWS = 40  # with fewer, shares say little
MANY_LABELS = 30  # number of labels from which they are suspicious if most occur only once
SHOWN = 3  # examples in a message


def label_notes(texts: Sequence[LabeledText], targets: np.ndarray, labels: Labels) -> Iterator[str]:
    """Yields messages about the training rows with these targets."""
    yield from _conflicts(texts, targets)
    if labels.kind == "regression":
        return
    yield from _variants(texts, labels)
    if labels.kind == "single":
        counts = np.bincount(targets[:, 0], minlength=len(labels.names))
        if len(counts) > MANY_LABELS and 2 * np.count_nonzero(counts == 1) > len(counts):
            yield (
                f"{np.count_nonzero(counts == 1):,} of {len(counts):,} labels occur only once; if the label is another "
                "column, set data.label_column."
            )
            return
    else:
        counts = targets.sum(axis=0)
        if not targets.any(axis=1).all():
            yield f"{counted(int((~targets.any(axis=1)).sum()), 'row')} without any label."
        elif len(labels.names) > 2 and (targets.sum(axis=1) == 1).all():
            yield "each row has exactly one label; to predict one label per row, set data.label_kind to single."
    yield from _balance(counts, len(texts), labels)


def _conflicts(texts: Sequence[LabeledText], targets: np.ndarray) -> Iterator[str]:
    """Yields a message about texts that occur with different labels."""
    found: dict[tuple[str, str | None], dict[bytes, LabeledText]] = defaultdict(dict)
    for text, target in zip(texts, targets, strict=True):
        found[text.text.strip(), text.pair].setdefault(target.tobytes(), text)
    conflicts = [[*rows.values()] for rows in found.values() if len(rows) > 1]
    if conflicts:
        shown = " and ".join(f"{row.label!r} in {row.where}" for row in conflicts[0][:2])
        are = "text occurs" if len(conflicts) == 1 else "texts occur"
        first = truncate(conflicts[0][0].text.strip(), 40)
        yield f"{len(conflicts):,} {are} with different labels, such as {first!r}: {shown}."


def _variants(texts: Sequence[LabeledText], labels: Labels) -> Iterator[str]:
    """Yields messages about labels that are written in several ways."""
    written = Counter(v for text in texts for v in _values(text) if isinstance(v, str))
    trimmed = [value for value in written if value != value.strip() and value.strip() in written]
    if trimmed:
        rows = counted(sum(written[value] for value in trimmed), "row")
        yield f"white space around labels is left out, such as that of {trimmed[0]!r} in {rows}."
    yield from alike_labels(labels.names)


def alike_labels(names: Iterable[str]) -> Iterator[str]:
    """Yields a message about labels that differ only in case or white space."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[" ".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    groups = [names for names in alike.values() if len(names) > 1]
    if groups:
        shown = "; ".join(", ".join(map(repr, names)) for names in groups[:SHOWN])
        yield f"labels that differ only in case or white space are different labels: {shown}; make them equal."


def _values(text: LabeledText) -> list[object]:
    return [*text.label] if isinstance(text.label, list) else [text.label]


def _balance(counts: np.ndarray, rows: int, labels: Labels) -> Iterator[str]:
    """Yields a message about rare labels."""
    limit = rows * (RARE if labels.kind == "multiple" else min(RARE, RARE_OF_EVEN / len(counts)))
    rare = [(int(count), name) for count, name in zip(counts, labels.names, strict=True) if count < limit]
    if rare and rows >= MIN_ROWS:
        shown = ", ".join(f"{truncate(name)} ({count / rows:.1%})" for count, name in sorted(rare)[:SHOWN])
        more = f" and {len(rare) - SHOWN} more" if len(rare) > SHOWN else ""
        remedy = "data.class_weights balanced gives them more weight"
        yield f"rare labels in {counted(rows, 'row')}: {shown}{more}; {remedy}."
