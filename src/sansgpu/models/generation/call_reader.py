"""Divides an answer into text and calls of functions while it is generated."""

from __future__ import annotations

from collections.abc import Iterator

from sansgpu.models.generation.call_form import CallForm
from sansgpu.models.generation.calls import Schemas, ToolCall

MAX_CLOSINGS = 16  # texts that may end a call before the text is no call: a string in its arguments may contain some


class ToolCallReader:
    """Divides an answer, which arrives in pieces, into text and calls.

    The result does not depend on how the text is divided into pieces. Text that may belong to a call is held back, and
    returned as text if it turns out to be none, such as a call whose arguments are broken. White space around calls is
    dropped.
    """

    def __init__(self, form: CallForm, schemas: Schemas, at_most: int | None = None) -> None:
        """`schemas` are those of the functions that can be called, and `at_most` is the maximum number of calls."""
        self._form, self._schemas, self._room = form, schemas, at_most
        self._held = ""
        self._may_be_bare, self._follows_call = form.bare_opening is not None, False
        self._closings, self._searched = 0, 0  # closings after the opening at the start of the held text
        self.has_calls = False

    def add(self, piece: str) -> Iterator[str | ToolCall]:
        """Yields the text that is certain not to belong to a call, and the calls that are complete."""
        self._held += piece
        if self._may_be_bare:
            opening = self._form.find_opening(self._held)
            is_marked = opening is not None and not self._held[: opening[0]].strip()
            self._may_be_bare = not is_marked and self._form.can_be_bare(self._held, self._schemas)
        if not self._may_be_bare:
            yield from self._marked(is_end=False)

    def end(self) -> Iterator[str | ToolCall]:
        """Yields the rest once the text has ended."""
        calls = self._form.read_bare(self._held, self._schemas) if self._may_be_bare else None
        if calls is not None:
            self._held = ""
            yield from self._counted(calls)
        yield from self._marked(is_end=True)

    def _marked(self, is_end: bool) -> Iterator[str | ToolCall]:
        """Yields the text and the calls in the held text that are certain."""
        while (opening := self._form.find_opening(self._held)) is not None:
            start, stop = opening
            yield from self._text(len(self._held[:start].rstrip()))
            start = len(self._held) - len(self._held.lstrip())  # white space before the call is held
            stop -= opening[0] - start
            found = self._calls_from(stop, is_end)
            if found is None:
                return
            self._closings = self._searched = 0
            calls, end = found
            if not calls:
                yield from self._text(stop)
                continue
            self._held, self._follows_call = self._held[end:], True
            yield from self._counted(calls)
        certain = len(self._held) if is_end else self._form.opening_begun(self._held)
        yield from self._text(certain if is_end else len(self._held[:certain].rstrip()))

    def _calls_from(self, start: int, is_end: bool) -> tuple[list[ToolCall], int] | None:
        """Returns the calls after an opening and where they end; no calls if it is text; None if it is incomplete."""
        while self._closings < MAX_CLOSINGS:
            closing = self._form.find_closing(self._held, max(start, self._searched))
            if closing is None:
                break
            self._closings, self._searched = self._closings + 1, closing
            calls, end = self._form.read(self._held[:closing], start, self._schemas)
            after = self._form.after_closing(self._held[:closing], end, is_end=False) if calls else None
            if after is not None:
                return calls, after
        else:
            return [], start
        if not is_end:
            return None
        calls, end = self._form.read(self._held, start, self._schemas)
        after = self._form.after_closing(self._held, end, is_end=True) if calls else None
        return ([], start) if after is None else (calls, after)

    def _text(self, stop: int) -> Iterator[str]:
        """Yields the held text up to `stop`, if any."""
        text, self._held = self._held[:stop], self._held[stop:]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            yield text

    def _counted(self, calls: list[ToolCall]) -> Iterator[ToolCall]:
        self.has_calls = True
        if self._room is not None:
            calls = calls[: self._room]
            self._room -= len(calls)
        yield from calls
