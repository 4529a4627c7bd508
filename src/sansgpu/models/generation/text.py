"""Turns generated tokens into pieces of text, and cuts the text at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # an incomplete UTF-8 sequence is decoded as this character


class TextPieces:
    """Decodes tokens one by one into pieces, which together are the decoded text of all tokens.

    Only the last tokens are decoded again for each piece: those of the piece before it, because some tokenizers decode
    the first token of a text in a different way, and those whose last character is still incomplete.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._returned = 0  # the text of ids[start:returned] is the last piece

    def add(self, token: int) -> str:
        """Returns the text that a token adds, which is empty while a character is incomplete."""
        self._ids.append(token)
        piece = self._rest()
        if piece.endswith(REPLACEMENT):
            return ""
        if piece:
            self._start = self._returned
        self._returned = len(self._ids)
        return piece

    def end(self) -> str:
        """Returns the text of an incomplete character at the end."""
        return self._rest()

    def _rest(self) -> str:
        before = self._decode(self._ids[self._start : self._returned])
        return self._decode(self._ids[self._start :])[len(before) :]


class StopStrings:
    """Cuts a text, which arrives in pieces, before the stop string that is complete first.

    The result does not depend on how the text is divided into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""  # text that may be the beginning of a stop string
        self.found = False

    def add(self, piece: str) -> str:
        """Returns the text that is certain not to belong to a stop string. Sets `found` if one is complete."""
        self._held += piece
        ends = ((self._held.find(one) + len(one), -len(one)) for one in self._strings if one in self._held)
        if (first := min(ends, default=None)) is not None:
            self.found = True
            text, self._held = self._held[: first[0] + first[1]], ""
            return text
        begun = max((self._begun(one) for one in self._strings), default=0)
        text, self._held = self._held[: len(self._held) - begun], self._held[len(self._held) - begun :]
        return text

    def _begun(self, string: str) -> int:
        """Returns how many characters at the end of the held text are the beginning of a stop string."""
        lengths = range(min(len(string) - 1, len(self._held)), 0, -1)
        return next((length for length in lengths if self._held.endswith(string[:length])), 0)

    def end(self) -> str:
        """Returns the held text once the text has ended."""
        text, self._held = self._held, ""
        return text


def without_stop(text: str, strings: Sequence[str]) -> str:
    """Returns a complete text up to the stop string that is complete first."""
    stops = StopStrings(strings)
    found = stops.add(text)
    return found if stops.found else found + stops.end()


class StopDetector:
    """Finds stop strings in tokens as they are generated."""

    def __init__(self, decode: Callable[[list[int]], str], strings: Sequence[str]) -> None:
        self._pieces, self._stops, self._read = TextPieces(decode), StopStrings([s for s in strings if s]), 0

    def ends(self, ids: Sequence[int]) -> bool:
        """Returns whether a stop string is complete in `ids`, which have grown since the last call."""
        for token in ids[self._read :]:
            self._stops.add(self._pieces.add(token))
        self._read = len(ids)
        return self._stops.found
