"""Tokenizes texts with tagged words into windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.data.batch import IGNORE
from sansgpu.data.conll import DEFAULT_TAG_COLUMN, OUTSIDE
from sansgpu.data.formats.names import file_form
from sansgpu.data.forms.form import resolve_columns
from sansgpu.data.forms.tags import TAGGED
from sansgpu.data.forms.words import TaggedText
from sansgpu.data.row_report import RowReport
from sansgpu.data.sequences import PackedSequences, Window, WindowedTexts, encoded_windows, require_overlap_fits
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.data.sources import Source, open_single
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.evaluation import TokenizedCorpus
from sansgpu.tasks.fine_tuning import longest_example
from sansgpu.tasks.tokens.tagged import with_targets

BATCH = 1000  # texts per call of the tokenizer, which runs in parallel


@dataclass(frozen=True, eq=False)
class TagWindow(Window):
    """A window of a text, with the first tokens of the P words that are targets in this window.

    A word is a target in only one window: the one in which it has the most context.
    """

    places: np.ndarray  # (P,) int32: position of each word's first token in the window
    words: np.ndarray  # (P,) int32: index of each word in the text


@tokenizer_errors()
def make_tag_windows(texts: Sequence[TaggedText], tokenizer: Any, max_length: int, overlap: int) -> list[TagWindow]:
    """Tokenizes texts in order into windows of at most `max_length` tokens that overlap by `overlap` tokens.

    Ignores words without a token of their own, as transformers does. Raises ConfigError if the overlap leaves no room.
    """
    require_overlap_fits(tokenizer, max_length, overlap, pair=False)
    windows: list[TagWindow] = []
    for first in range(0, len(texts), BATCH):
        windows += _batch_windows(texts[first : first + BATCH], first, tokenizer, max_length, overlap)
    return windows


def _batch_windows(
    texts: Sequence[TaggedText], first: int, tokenizer: Any, max_length: int, overlap: int
) -> list[TagWindow]:
    encoded = list(encoded_windows([[text.text for text in texts]], tokenizer, 0, first, max_length, overlap))
    counts = Counter(window.text for window, _, _ in encoded)
    windows = [
        TagWindow(
            window.text,
            window.ids,
            window.type_ids,
            *_first_tokens(texts[window.text - first], offsets, sides == 0, whole=counts[window.text] == 1),
        )
        for window, offsets, sides in encoded
    ]
    return [window for window in _scored_once(windows) if len(window.places)]


def _first_tokens(
    text: TaggedText, offsets: np.ndarray, inside: np.ndarray, whole: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the positions of the words' first tokens in a window, and the indices of these words.

    A token belongs to the first word with which it shares a character; a token that is only the space before a word
    belongs to that word. `offsets` (T, 2) are the start and end characters of the tokens; `inside` (T,) is False for
    special tokens; `whole` is True if the window contains the entire text.
    """
    words = np.searchsorted(text.ends, offsets[:, 0], side="right")
    begins = text.starts[np.minimum(words, len(text.starts) - 1)]
    shares = begins < offsets[:, 1]
    for place in np.flatnonzero(begins == offsets[:, 1]):
        start, end = offsets[place]
        shares[place] = text.text[start:end] in ("", " ")
    places = np.flatnonzero(inside & (words < len(text.ends)) & shares)
    is_first = np.diff(words[places], prepend=-1) != 0
    if not whole and len(places):  # the window may start in the middle of a word
        is_first[0] &= offsets[places[0], 0] <= begins[places[0]]
    places = places[is_first]
    return places.astype(np.int32), words[places].astype(np.int32)


def _scored_once(windows: list[TagWindow]) -> list[TagWindow]:
    """Removes each word from all windows except the one in which it is farthest from the nearer end of the window."""
    best: dict[tuple[int, int], tuple[int, int]] = {}  # (text, word) -> (context in tokens, window)
    for number, window in enumerate(windows):
        contexts = np.minimum(window.places, len(window.ids) - 1 - window.places)
        for word, context in zip(window.words.tolist(), contexts.tolist(), strict=True):
            if context > best.get((window.text, word), (-1, 0))[0]:
                best[window.text, word] = context, number
    kept = []
    for number, window in enumerate(windows):
        here = np.array([best[window.text, word][1] == number for word in window.words.tolist()], bool)
        kept.append(replace(window, places=window.places[here], words=window.words[here]))
    return kept


@dataclass(frozen=True)
class TaggedWindows(WindowedTexts):
    """Texts with their tokenized windows, and the bad rows that were skipped."""

    texts: list[TaggedText]
    targets: list[np.ndarray]  # label id of each word; all 0 if the texts have no tags
    windows: list[TagWindow]
    bad_rows: RowReport

    def notes(self) -> Iterator[str]:
        """Yields a message if texts were split into several windows."""
        if cut := sum(len(numbers) > 1 for numbers in self.by_text()):
            yield f"{cut:,} of {len(self.texts):,} are longer than data.max_length and were split into windows."

    def batch(self, numbers: np.ndarray) -> PackedSequences:
        """Returns a batch of the windows `numbers`. Only the first token of a word has a target."""
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
    bad_rows: RowReport,
    in_training: bool,
) -> TaggedWindows:
    """Tokenizes texts into windows, which overlap unless `in_training`. Texts with unknown tags are bad rows.

    If `labels` is None, tags are ignored.
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
        """Returns the first training text, with tags in brackets after the words."""
        text = self.train.texts[0]
        words = (f"{text.word(n)} ⟦{tag}⟧" if tag != OUTSIDE else text.word(n) for n, tag in enumerate(text.tags))
        return " ".join(words)


def open_tagged(name: str, data: TaggedDataConfig, notes: list[str]) -> Source:
    """Opens a dataset to evaluate on, in the same format as the run's. Reads files with unknown suffixes as CoNLL."""
    path, tag_column = local_path(name), data.tag_column
    has_rows = path.is_file() and file_form(path) not in (".conll", ".txt", None)
    if has_rows:  # formats may differ from training
        tag_column = None
    if tag_column is None and path.is_file() and file_form(path) is None:
        tag_column = DEFAULT_TAG_COLUMN
    settings, numbered = resolve_columns(
        TaggedDataConfig(dataset_name=name, dataset_config=data.dataset_config, tag_column=tag_column), TAGGED
    )
    if has_rows and settings.tag_column is not None and data.tag_column is not None:  # a table in CoNLL format
        settings, numbered = settings.model_copy(update={"tag_column": data.tag_column}), None
    notes += [f"{numbered}."] if numbered else []
    return open_single(name, settings)
