"""Pieces of text add up to the decoded text, and stop strings are found however the text is divided."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from sansgpu.models.generation.text import StopStrings, TextPieces
from tests.models.small import TOKENIZER

# A vocabulary like Llama 2's: words with a mark for the space before them, and bytes. The first space is not decoded.
LIKE_LLAMA = Tokenizer(
    models.BPE(
        {word: n for n, word in enumerate(["▁a", "b", "▁", "▁the", "."] + [f"<0x{n:02X}>" for n in range(256)])}, []
    )
)
LIKE_LLAMA.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def joined(pieces: TextPieces, ids: Sequence[int]) -> str:
    return "".join([*map(pieces.add, ids), pieces.end()])


@given(st.lists(st.integers(0, 299), max_size=40))
def test_pieces_add_up_to_the_text_of_any_tokens(ids: list[int]) -> None:
    assert joined(TextPieces(TOKENIZER.decode), ids) == TOKENIZER.decode(ids)


@given(st.text(max_size=30))
def test_pieces_of_a_text_have_whole_characters(text: str) -> None:
    pieces = TextPieces(TOKENIZER.decode)
    parts = [pieces.add(token) for token in TOKENIZER.encode(text)]
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    assert "".join(parts) + pieces.end() == text


@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4], [5 + 0xC3, 5 + 0xA9], [5 + 0x41]]), max_size=20))
def test_a_space_between_words_is_not_lost(characters: list[list[int]]) -> None:
    ids = [token for character in characters for token in character]
    assert joined(TextPieces(LIKE_LLAMA.decode), ids) == LIKE_LLAMA.decode(ids)


def cut(text: str, strings: Sequence[str]) -> str:
    """Returns the text before the stop string that is complete first; of two, the longer."""
    found = [(text.index(one) + len(one), text.index(one)) for one in strings if one in text]
    return text[: min(found)[1]] if found else text


@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_text_is_cut_at_the_first_stop_string(pieces: list[str], strings: list[str]) -> None:
    stops, text = StopStrings(strings), ""
    for piece in pieces:
        text += stops.add(piece)
        assert not any(one in text for one in strings)
        if stops.found:
            break
    text += stops.end()
    assert text == cut("".join(pieces), strings)
    assert stops.found == any(one in "".join(pieces) for one in strings)


@pytest.mark.parametrize("strings", [[], ["xyz"]])
def test_text_without_a_stop_string_is_returned_at_once(strings: list[str]) -> None:
    stops = StopStrings(strings)
    assert [stops.add(piece) for piece in ("hello", " x", "y", "!", "x")] == (
        ["hello", " x", "y", "!", "x"] if not strings else ["hello", " ", "", "xy!", ""]
    )
    assert stops.end() == ("x" if strings else "")
