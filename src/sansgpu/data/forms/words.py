"""Texts with their words, and the tags of these words.

W words of a text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import BertPreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from sansgpu.data.conll import OUTSIDE
from sansgpu.data.rows import SourceRow, TypedRow

# How texts are split into words: as in BERT, by white space and punctuation, and by character in unspaced scripts.
_UNSPACED = Regex(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")
_WORDS = Steps([BertPreTokenizer(), Split(_UNSPACED, "isolated")])


class WordSpan(NamedTuple):
    """Words [start, stop) with a label."""

    start: int
    stop: int
    label: str


def iob2_tags(spans: Iterable[WordSpan], words: int) -> tuple[str, ...]:
    """Returns the IOB2 tags of a sentence: `B-` for the first word of each span and `I-` for its other words."""
    tags = [OUTSIDE] * words
    for span in spans:
        tags[span.start : span.stop] = [f"B-{span.label}", *[f"I-{span.label}"] * (span.stop - span.start - 1)]
    return tuple(tags)


@dataclass(frozen=True, eq=False)
class TaggedText(TypedRow):
    """A text with its words. `tags` has one tag per word, or is empty if the row has no tags."""

    text: str
    starts: np.ndarray  # (W,) int32: start character of each word
    ends: np.ndarray  # (W,) int32: end character of each word
    tags: tuple[str, ...] = ()
    moved_spans: int = 0  # spans that do not start and end at word boundaries
    dropped_spans: int = 0  # spans that overlap with a longer one, or have no word that no other span has
    has_numbers: bool = False  # True: the tags are numbers without names
    given_words: bool = False  # True: the row has the words, which `text` joins with spaces

    def word(self, number: int) -> str:
        return self.text[self.starts[number] : self.ends[number]]


def word_bounds(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start and end characters of the words of a text, (W,) each."""
    starts, ends = np.array([place for _, place in _WORDS.pre_tokenize_str(text)], np.int32).reshape(-1, 2).T
    return starts, ends


def of_tokens(row: SourceRow, tokens: object) -> TaggedText:
    """Joins the tokens of a row with spaces into a text whose words are these tokens."""
    if not isinstance(tokens, list) or not tokens:
        raise row.error("its tokens are not a non-empty list")
    for number, token in enumerate(tokens):
        if not row.valid_text(token, "tokens"):
            raise row.error(f"token {number} is empty")
    if not "".join(tokens).strip():
        raise row.error("its tokens contain only white space")
    ends = np.cumsum([len(token) + 1 for token in tokens]) - 1
    starts = ends - [len(token) for token in tokens]
    text = " ".join(tokens)
    return TaggedText(row.where, text, starts.astype(np.int32), ends.astype(np.int32), given_words=True)


def longest_first(spans: Iterable[WordSpan]) -> tuple[list[WordSpan], int]:
    """Returns the spans that overlap with no longer one, in order, and the number of those left out.

    Of overlapping spans of equal length, the first one is kept. A repeated span counts once.
    """
    given = list(dict.fromkeys(spans))
    kept: list[WordSpan] = []
    for span in sorted(given, key=lambda span: (span.start - span.stop, span.start)):
        place = bisect_left(kept, span.start, key=itemgetter(0))
        if all(span.stop <= other.start or other.stop <= span.start for other in kept[max(0, place - 1) : place + 1]):
            kept.insert(place, span)
    return kept, len(given) - len(kept)
