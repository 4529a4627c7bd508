"""Tokenizes texts whose words have tags into windows; the first token of each word predicts its tag.

With transformers' run_ner.py, whose words are always given, tokens and labels are equal. T tokens, P scored words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sansgpu.machine.tokenizer_trial import tokenizer_errors
from sansgpu.tasks.qa.questions import require_overlap_fits
from sansgpu.tasks.tokens.tagged import TaggedText

BATCH = 1000  # texts tokenized in one call, in parallel


@dataclass(frozen=True, eq=False)
class TagWindow:
    """A window of T tokens of a text, and the first tokens of the P words that are scored in this window.

    A word is scored in one window only: the one in which it has most context.
    """

    text: int  # index of the text
    ids: np.ndarray  # (T,) int32
    type_ids: np.ndarray | None  # (T,) int8, if the tokenizer has them
    places: np.ndarray  # (P,) int32: indices of tokens
    words: np.ndarray  # (P,) int32: indices of words in the text


@tokenizer_errors()
def make_tag_windows(texts: Sequence[TaggedText], tokenizer: Any, max_length: int, overlap: int) -> list[TagWindow]:
    """Tokenizes texts, in order, into windows of at most `max_length` tokens that overlap by `overlap` tokens.

    A word without a token of its own is in no window; transformers ignores it, too. Raises ConfigError if the overlap
    leaves no room.
    """
    require_overlap_fits(tokenizer, max_length, overlap, pair=False)
    windows: list[TagWindow] = []
    for first in range(0, len(texts), BATCH):
        windows += _batch_windows(texts[first : first + BATCH], first, tokenizer, max_length, overlap)
    return windows


def _batch_windows(
    texts: Sequence[TaggedText], first: int, tokenizer: Any, max_length: int, overlap: int
) -> list[TagWindow]:
    encoded = tokenizer(
        [text.text for text in texts],
        truncation=True,
        max_length=max_length,
        stride=overlap,
        padding=False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = np.array(encoded["overflow_to_sample_mapping"], np.int64)
    counts = np.bincount(owners, minlength=len(texts))
    windows: list[TagWindow] = []
    for number, owner in enumerate(owners.tolist()):
        ids = encoded["input_ids"][number]
        types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else None
        offsets = np.array(encoded["offset_mapping"][number], np.int64).reshape(-1, 2)
        inside = np.array([side is not None for side in encoded.sequence_ids(number)], bool)
        window = TagWindow(
            first + owner,
            np.array(ids, np.int32),
            None if types is None else np.array(types, np.int8),
            *_first_tokens(texts[owner], offsets, inside, whole=bool(counts[owner] == 1)),
        )
        windows.append(window)
    return [window for window in _scored_once(windows) if len(window.places)]


def _first_tokens(
    text: TaggedText, offsets: np.ndarray, inside: np.ndarray, whole: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first token of each word in a window, and the words.

    A token belongs to the first word that it shares a character with; a token that is only the space before a word
    belongs to that word. `offsets` (T, 2) are the characters of the tokens; `inside` (T,) is False for special tokens;
    `whole` is True if the window contains all of the text.
    """
    words = np.searchsorted(text.ends, offsets[:, 0], side="right")
    begins = text.starts[np.minimum(words, len(text.starts) - 1)]
    shares = begins < offsets[:, 1]
    for place in np.flatnonzero(begins == offsets[:, 1]):
        start, end = offsets[place]
        shares[place] = text.text[start:end] in ("", " ")
    places = np.flatnonzero(inside & (words < len(text.ends)) & shares)
    is_first = np.diff(words[places], prepend=-1) != 0
    if not whole and len(places):  # the window may begin in the middle of a word
        is_first[0] &= offsets[places[0], 0] <= begins[places[0]]
    places = places[is_first]
    return places.astype(np.int32), words[places].astype(np.int32)


def _scored_once(windows: list[TagWindow]) -> list[TagWindow]:
    """Removes each word from all windows but the one in which the nearer end of the window is farthest away."""
    best: dict[tuple[int, int], tuple[int, int]] = {}  # by (text, word): context in tokens, and the window
    for number, window in enumerate(windows):
        contexts = np.minimum(window.places, len(window.ids) - 1 - window.places)
        for word, context in zip(window.words.tolist(), contexts.tolist(), strict=True):
            if context > best.get((window.text, word), (-1, 0))[0]:
                best[window.text, word] = context, number
    kept = []
    for number, window in enumerate(windows):
        here = np.array([best[window.text, word][1] == number for word in window.words.tolist()], bool)
        kept.append(TagWindow(window.text, window.ids, window.type_ids, window.places[here], window.words[here]))
    return kept
