"""Reads, splits and tokenizes the data of embedding models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, shown
from sansgpu.data.forms.pairs import TextRow
from sansgpu.data.row_report import RowReport
from sansgpu.data.split import split_examples
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.models.huggingface.sentence_embedding import EmbeddingLayout
from sansgpu.tasks.embed.groups import TokenizedGroups
from sansgpu.tasks.embed.settings import EmbeddingDataConfig
from sansgpu.tasks.evaluation import TokenizedCorpus

STS_SCALE = 5.0  # score of equal texts in most datasets of semantic textual similarity
NO_SCORE = -1.0  # stands for a missing score, as in the test data of GLUE
BATCH = 1000  # texts per call of the tokenizer, which runs in parallel


@dataclass(frozen=True)
class EmbeddingCorpus(TokenizedCorpus[TokenizedGroups]):
    """Tokenized texts for training and validation."""

    @property
    def sequence_tokens(self) -> float:
        return self.train_tokens / self.train.text_count

    def most_tokens(self, examples: int, padded: bool) -> int:
        if not padded:
            return super().most_tokens(examples, padded)
        return max(
            examples * part.most_texts * max(len(text) for text in part.texts) for part in (self.train, self.validation)
        )

    def preview(self) -> str | None:
        """Returns the texts of the first example, separated by bars."""
        batch = self.train.batch(np.array([0]))
        return " | ".join(self.tokenizer.decode(text) for text in batch.tokens.split(batch.lengths.tolist()))


class ScoreRange(NamedTuple):
    """The scores that rows may have; they are divided by `scale` to get similarities."""

    lowest: float
    scale: float

    def describe(self, rows: Sequence[TextRow]) -> str | None:
        """Returns a message about the scores of rows unless they are similarities already."""
        scores = [row.score for row in rows if row.score is not None]
        if self.scale == 1:
            return None
        return f"scores from {min(scores):g} to {max(scores):g} are divided by {self.scale:g} (data.score_scale)"


def score_range(rows: Sequence[TextRow], data: EmbeddingDataConfig) -> ScoreRange | None:
    """Returns the range of the scores of training rows, or None without scores."""
    scores = [row.score for row in rows if row.score is not None]
    if not scores:
        return None
    scale, highest = data.score_scale, max(scores)
    if scale is None:
        scale = 1.0 if highest <= 1 else float(math.ceil(highest))
        if 2 < highest < STS_SCALE and not highest.is_integer():
            scale = STS_SCALE
    negative = {score for score in scores if score < 0}
    missing = {NO_SCORE} if scale > 1 else set()
    return ScoreRange(-scale if negative - missing else 0.0, scale)


def with_scores_in_range(rows: Iterable[TextRow], limits: ScoreRange | None, bad_rows: RowReport) -> list[TextRow]:
    """Returns the rows whose scores are in the range of the training data. Others are bad rows."""

    def checked(row: TextRow) -> TextRow:
        if row.score is not None and limits is not None and not limits.lowest <= row.score <= limits.scale:
            raise row.error(
                f"its score {row.score:g} is not between {limits.lowest:g} and data.score_scale {limits.scale:g}"
            )
        return row

    return list(bad_rows.parsed(rows, checked))


def _without_unique_labels(rows: list[TextRow], name: str, notes: list[str]) -> list[TextRow]:
    """Removes texts whose label no other text has. Raises ConfigError if all labels are equal."""
    labels = Counter(row.label for row in rows)
    if len(labels) == 1 < len(rows):
        raise ConfigError(
            f"{name}: every row has the label {next(iter(labels))}, so there is nothing to learn; add rows with "
            "different labels."
        )
    kept = [row for row in rows if labels[row.label] > 1]
    if alone := len(rows) - len(kept):
        notes.append(f"{name}: {counted(alone, 'text')} skipped, because no other text has the same label.")
    return kept


def split_rows(rows: list[TextRow], share: float) -> tuple[list[TextRow], list[TextRow]]:
    """Splits rows into training and validation rows. Rows with the same first text go to the same split."""
    parts = split_examples([row.texts[0].encode() for row in rows], np.ones(len(rows)), share)
    train, held = ([rows[number] for number in part] for part in parts)
    return train, held


@dataclass(frozen=True)
class TextShape:
    """How rows are tokenized. `seed` determines the random positives of labeled texts."""

    tokenizer: Any
    max_length: int
    layout: EmbeddingLayout  # with the prompts that are prepended to texts
    seed: int
    score_scale: float | None  # None for rows without scores

    def prompted(self, row: TextRow) -> list[tuple[str, str]]:
        """Returns the prompt and the text of each text of a row."""
        if row.kind != "pairs":
            return [(self.layout.prompt(), text) for text in row.texts]
        anchor, *others = row.texts
        return [(self.layout.query_prompt, anchor), *((self.layout.passage_prompt, text) for text in others)]


def tokenize_groups(
    rows: Sequence[TextRow], shape: TextShape, bad_rows: RowReport, name: str, notes: list[str]
) -> TokenizedGroups:
    """Tokenizes each distinct text once. Rows with a text without tokens are bad rows.

    Appends messages about skipped rows and labels to `notes`, in which `name` is the name of the dataset.
    """
    prompted = list(dict.fromkeys(text for row in rows for text in shape.prompted(row)))
    number_of = {text: number for number, text in enumerate(prompted)}
    tokens = tokenize([prompt + text for prompt, text in prompted], shape.tokenizer, shape.max_length)

    def checked(row: TextRow) -> TextRow:
        if any(not len(tokens[number_of[text]]) for text in shape.prompted(row)):
            raise row.error("one of its texts has no tokens")
        return row

    rows = list(bad_rows.parsed(rows, checked))
    bad_rows.report(lambda note: notes.append(f"{name}: {note}"))
    texts = {text: number for number, text in enumerate(dict.fromkeys(text for _, text in prompted))}
    meanings = np.array([texts[text] for _, text in prompted], np.int64)  # without the prompts
    members = [tuple(number_of[text] for text in shape.prompted(row)) for row in rows]
    labeled = any(row.label is not None for row in rows)
    if labeled:
        rows = _without_unique_labels(rows, name, notes)
        members = [tuple(number_of[text] for text in shape.prompted(row)) for row in rows]
        labels = {label: number for number, label in enumerate(dict.fromkeys(row.label for row in rows))}
        tokens = [tokens[number] for (number,) in members]  # one per row: equal texts can differ in label
        meanings = np.array([labels[row.label] for row in rows], np.int64)
        members = [(number,) for number in range(len(rows))]
    scale = shape.score_scale
    scores = None if scale is None else np.array([(row.score or 0.0) / scale for row in rows], np.float32)
    return TokenizedGroups(tokens, meanings, members, scores, labeled, shape.seed, bad_rows.skipped)


@tokenizer_errors()
def tokenize(texts: Sequence[str], tokenizer: Any, max_length: int, prompt: str = "") -> list[np.ndarray]:
    """Tokenizes each text after `prompt`, truncated to `max_length`, with the model's special tokens."""
    found: list[np.ndarray] = []
    for first in range(0, len(texts), BATCH):
        encoded = tokenizer(
            [prompt + text for text in texts[first : first + BATCH]],
            truncation=True,
            max_length=max_length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        found += [np.array(ids, np.int32) for ids in encoded["input_ids"]]
    return found


def prompt_note(rows: Sequence[TextRow], layout: EmbeddingLayout) -> str | None:
    """Returns a message about the prompts before the texts of rows, or None if there are none."""
    if not rows:
        return None
    if rows[0].kind != "pairs":
        return f"prompt {shown(layout.prompt())} before each text (data.prompts)" if layout.prompt() else None
    query, passage = layout.query_prompt, layout.passage_prompt
    if not query and not passage:
        return None
    return f"prompts {shown(query)} before anchors, {shown(passage)} before positives and negatives (data.prompts)"


def cut_note(part: TokenizedGroups, max_length: int) -> str | None:
    """Returns a message about texts that reach the maximum length, which may be truncated, or None."""
    cut = sum(len(text) >= max_length for text in part.texts)
    return f"{cut:,} of {len(part.texts):,} texts are truncated to data.max_length {max_length}" if cut else None
