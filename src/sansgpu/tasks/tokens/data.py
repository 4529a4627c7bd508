"""Tokenized texts whose words have tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sansgpu.config import Config, DataConfig
from sansgpu.config.paths import local_path
from sansgpu.data.batch import IGNORE
from sansgpu.data.conll import DEFAULT_TAG_COLUMN
from sansgpu.data.files import file_form
from sansgpu.data.headers import number_tag_column
from sansgpu.data.rows import BadRows
from sansgpu.data.sequences import PackedSequences, WindowedTexts
from sansgpu.data.sources import Source, open_single
from sansgpu.tasks.fine_tuning import longest_example
from sansgpu.tasks.tokens.spans import OUTSIDE
from sansgpu.tasks.tokens.tagged import TaggedText, with_targets
from sansgpu.tasks.tokens.windows import TagWindow, make_tag_windows
from sansgpu.tasks.variable_length_corpus import TokenizedCorpus


@dataclass(frozen=True)
class TaggedWindows(WindowedTexts):
    """Texts with their tokenized windows, and the bad rows that were left out."""

    texts: list[TaggedText]
    targets: list[np.ndarray]  # index of each word's label; all 0 if the texts have no tags
    windows: list[TagWindow]
    bad_rows: BadRows

    def notes(self) -> Iterator[str]:
        """Yields a note if texts were cut into several windows."""
        if cut := sum(len(numbers) > 1 for numbers in self.by_text()):
            yield f"{cut:,} of {len(self.texts):,} are longer than data.max_length and were cut into windows."

    def by_text(self) -> list[list[int]]:
        """Returns the indices of the windows of each text that has any."""
        groups: dict[int, list[int]] = {}
        for number, window in enumerate(self.windows):
            groups.setdefault(window.text, []).append(number)
        return list(groups.values())

    def batch(self, numbers: np.ndarray) -> PackedSequences:
        """Returns the windows with these indices; the target of a word is at its first token."""
        windows = [self.windows[number] for number in numbers]
        targets = [np.full(len(window.ids), IGNORE, np.int64) for window in windows]
        for target, window in zip(targets, windows, strict=True):
            target[window.places] = self.targets[window.text][window.words]
        return self.packed(numbers, targets)


def tokenize_texts(
    texts: list[TaggedText],
    labels: Sequence[str] | None,
    config: Config,
    tokenizer: Any,
    bad_rows: BadRows,
    in_training: bool,
) -> TaggedWindows:
    """Tokenizes texts into windows, which overlap except `in_training`. Texts with unknown tags are bad rows.

    Without `labels`, tags are not used.
    """
    if labels is None:
        targets = [np.zeros(len(text.starts), np.int64) for text in texts]
    else:
        texts, targets = with_targets(texts, labels, bad_rows)
    overlap = 0 if in_training else config.data.doc_stride
    windows = make_tag_windows(texts, tokenizer, longest_example(config, tokenizer), overlap)
    return TaggedWindows(texts, targets, windows, bad_rows)


@dataclass(frozen=True)
class TagCorpus(TokenizedCorpus[TaggedWindows]):
    """Tagged texts and their windows for training and validation."""

    def preview(self) -> str | None:
        """Returns the first training text, with the tags in brackets after the words that have one."""
        text = self.train.texts[0]
        words = (f"{text.word(n)} ⟦{tag}⟧" if tag != OUTSIDE else text.word(n) for n, tag in enumerate(text.tags))
        return " ".join(words)


def _open_tagged(name: str, data: DataConfig, notes: list[str]) -> Source:
    """Opens data to evaluate on, of the same form as that of a run. A file with an unknown suffix has CoNLL columns."""
    path, tag_column = local_path(name), data.tag_column
    if tag_column is None and path.is_file() and file_form(path) is None:
        tag_column = DEFAULT_TAG_COLUMN
    settings, numbered = number_tag_column(
        DataConfig(dataset_name=name, dataset_config=data.dataset_config, tag_column=tag_column)
    )
    notes += [f"{numbered}."] if numbered else []
    return open_single(name, settings)
