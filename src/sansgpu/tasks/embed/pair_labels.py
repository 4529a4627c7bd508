"""Decides what the labels of pairs of texts mean: similarities, or entailment and contradiction (NLI)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.row_report import RowReport
from sansgpu.tasks.embed.settings import EmbeddingDataConfig

Meaning = Literal["similarity", "binary", "nli"]  # binary: similarities of 0 and 1, in which -1 is no label
ENTAILMENT, NEUTRAL, CONTRADICTION, UNLABELED = "0", "1", "2", "-1"
NLI_WORDS = {
    **dict.fromkeys(("0", "entailment", "entails", "e"), ENTAILMENT),
    **dict.fromkeys(("1", "neutral", "n"), NEUTRAL),
    **dict.fromkeys(("2", "contradiction", "contradicts", "c"), CONTRADICTION),
    **dict.fromkeys(("-1", "-"), UNLABELED),
}
SAME = ("duplicate", "equivalent", "paraphrase", "entailment", "similar", "same", "yes", "true")
_NOT_SAME = (f"{prefix}_{word}" for prefix in ("not", "non") for word in SAME[:6])
DIFFERENT = ("different", "dissimilar", "unrelated", "no", "false", *_NOT_SAME)
SIMILARITIES = {**dict.fromkeys(SAME, 1.0), **dict.fromkeys(DIFFERENT, 0.0)}


def pair_meaning(rows: Sequence[TextRow], data: EmbeddingDataConfig, name: str) -> tuple[Meaning, str | None]:
    """Returns what the labels of the training pairs mean, and a message about it or None.

    Raises ConfigError if that is unclear.
    """
    labels = {_word(row) for row in rows if row.pair_label is not None}
    if not labels or data.pair_labels != "auto":
        return ("nli" if data.pair_labels == "nli" else "similarity"), None
    words = {label for label in labels if _number(label) is None}
    numbers = {number for label in labels if (number := _number(label)) is not None}
    if words - {"-"}:
        is_nli = labels <= NLI_WORDS.keys() and bool({NLI_WORDS[word] for word in words} & {NEUTRAL, CONTRADICTION})
        return "nli" if is_nli else "similarity", None
    if not all(number.is_integer() for number in numbers):
        return "similarity", None
    known, shown = numbers - {-1.0}, ", ".join(f"{number:g}" for number in sorted(numbers))
    if known <= {0.0, 1.0, 2.0} and {0.0, 2.0} <= known and data.score_scale != 2:
        return "nli", None
    if data.score_scale is not None or (any("." in label for label in labels) and not known <= {0.0, 1.0, 2.0}):
        return "similarity", None
    if known <= {0.0, 1.0}:
        return "binary" if 0 in known else "similarity", (
            f"{name}: the labels {shown} of pairs are read as similarities: 1 for texts that mean the same (data."
            "pair_labels). If 0 does, as for entailment in RTE and QNLI, swap them."
        )
    raise ConfigError(
        f"{name}: the labels of its pairs are the whole numbers {truncate(shown)}, which may be scores or classes; set "
        "data.pair_labels to similarity, and data.score_scale to the score of texts that mean the same, or to nli, or "
        "train on classes with task classify."
    )


def with_meaning(
    rows: list[TextRow], meaning: Meaning, bad_rows: RowReport, name: str, notes: list[str]
) -> list[TextRow]:
    """Returns pairs with labels as pairs with scores, or as triplets for NLI; appends messages to `notes`."""
    if not any(row.pair_label is not None for row in rows):
        return rows
    if meaning == "nli":
        return _triplets(rows, bad_rows, name, notes)
    return _scored(rows, meaning == "binary", bad_rows, name, notes)


def _word(row: TextRow) -> str:
    word = (row.pair_label or "").casefold()
    return word if word == "-" or _number(word) is not None else word.replace("-", "_").replace(" ", "_")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _scored(rows: list[TextRow], binary: bool, bad_rows: RowReport, name: str, notes: list[str]) -> list[TextRow]:
    read = set[str]()

    def scored(row: TextRow) -> TextRow:
        score, word = row.score, _word(row)
        if score is None and word in SIMILARITIES:
            score = SIMILARITIES[word]
            read.add(f"{row.pair_label} = {score:g}")
        if binary and score == -1:
            raise row.error("its label is -1, which means that it has no label")
        if score is None:
            raise row.error(f"its label is {row.pair_label!r} instead of a similarity (classes are for task classify)")
        return replace(row, score=score, pair_label=None)

    found = list(bad_rows.parsed(rows, scored))
    if read:
        notes.append(f"{name}: labels of pairs are read as similarities: {', '.join(sorted(read))}.")
    return found


def _triplets(rows: list[TextRow], bad_rows: RowReport, name: str, notes: list[str]) -> list[TextRow]:
    """Joins each entailed text with contradictions of the same premise."""

    def labeled(row: TextRow) -> tuple[str, TextRow]:
        word = row.pair_label if row.score is None else f"{row.score:g}"
        label = NLI_WORDS.get((word or "").casefold())
        if label is None:
            raise row.error(f"its label is {row.pair_label!r} instead of entailment, neutral or contradiction")
        return label, row

    found = list(bad_rows.parsed(rows, labeled))
    entailed, opposed = defaultdict[str, list[TextRow]](list), defaultdict[str, list[str]](list)
    for label, row in found:
        if label == ENTAILMENT:
            entailed[row.texts[0]].append(row)
        elif label == CONTRADICTION:
            opposed[row.texts[0]].append(row.texts[1])
    negatives: dict[int, tuple[str, ...]] = {}
    for premise, group in entailed.items():
        against = opposed.pop(premise, [])
        for number, row in enumerate(group):
            own = against[number :: len(group)] or against[number % len(against) :][:1] if against else []
            negatives[id(row)] = tuple(text for text in own if text not in row.texts)
    made = [
        replace(row, texts=(*row.texts, *negatives[id(row)]), score=None, pair_label=None)
        for label, row in found
        if label == ENTAILMENT
    ]
    if not made:
        raise ConfigError(
            f"{name}: no row has the label entailment (0), so there are no triplets; if the labels are similarities, "
            "set data.pair_labels to similarity."
        )
    counts = Counter(label for label, _ in found)
    alone = sum(len(row.texts) < 3 for row in made)
    notes.append(
        f"{name}: the labels of pairs are those of natural language inference (0 entailment, 1 neutral, 2 "
        f"contradiction; data.pair_labels): {counted(len(made) - alone, 'triplet')} of a premise, an entailed and a "
        f"contradicting text, {counted(alone, 'pair')} without a contradiction; left out: "
        f"{counted(sum(map(len, opposed.values())), 'contradiction')} of premises without an entailed text, "
        f"{counts[NEUTRAL]:,} neutral, {counts[UNLABELED]:,} without a label (-1)."
    )
    return made
