"""How a chat template writes the calls of an answer: in a syntax, and between texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from sansgpu.models.generation.call_syntax import MarkedValues, NamedJson, infer_syntax
from sansgpu.models.generation.calls import CallSyntax, Schemas, ToolCall, literal, skip_space
from sansgpu.models.generation.thoughts import THOUGHT_END


@dataclass(frozen=True)
class CallForm:
    """A syntax of calls, and the texts around them: an opening, separators between calls, and a closing.

    There may be several openings. `marks` are the special tokens in these texts, which decoding must not drop.
    """

    syntax: CallSyntax
    openings: tuple[str, ...]
    separator: str
    closing: str
    marks: frozenset[str] = field(default=frozenset())

    @cached_property
    def bare_opening(self) -> str | None:
        """The opening of an answer that consists of calls only; None if such answers have a mark."""
        bare = self._without_marks(self.openings[0]).strip()
        return None if _has_words(bare) else bare

    @cached_property
    def can_follow_text(self) -> bool:
        return _has_words(self.openings[0])

    @cached_property
    def can_precede_text(self) -> bool:
        return _has_words(self.closing)

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        return re.compile("|".join(literal(one.strip()) for one in self.openings))

    @cached_property
    def _separator(self) -> re.Pattern[str]:
        usual = r"\s*[;,]?"  # in case the template cannot write two calls
        return re.compile(rf"\s*{literal(self.separator.strip())}|{usual}" if self.separator.strip() else usual)

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(literal(self.closing.strip()))

    def find_opening(self, text: str) -> tuple[int, int] | None:
        """Returns where the first opening is in a text; None if there is none."""
        found = self._opening.search(text) if self.can_follow_text else None
        return None if found is None else found.span()

    def find_closing(self, text: str, start: int) -> int | None:
        """Returns where the next closing ends; None if there is none."""
        found = self._closing.search(text, start) if self.can_precede_text else None
        return None if found is None else found.end()

    def opening_begun(self, text: str) -> int:
        """Returns the place from which the end of a text may be the beginning of an opening."""
        if not self.can_follow_text:
            return len(text)
        first = max(0, len(text) - 2 * max(map(len, self.openings)))
        begins = {one.strip()[0] for one in self.openings}
        places = (place for place in range(first, len(text)) if text[place] in begins)
        return next((place for place in places if _begins(text[place:], self.openings)), len(text))

    def can_be_bare(self, text: str, names: Iterable[str]) -> bool:
        """Returns whether a text may be the beginning of an answer that consists of calls only."""
        opening = self.bare_opening
        if opening is None:
            return False
        starts = [opening + name for name in names] if self.syntax.starts_with_name else [opening + "{"]
        return _begins(text[: max(map(len, starts), default=0) * 2], starts) or _begins(text, self.openings)

    def read(self, text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
        """Returns the calls from a place after an opening on, and where the last one ends."""
        calls, end, place = list[ToolCall](), start, start
        while (found := self.syntax.read(text, skip_space(text, place), schemas)) is not None:
            calls.append(found.call)
            end, separator = found.end, self._separator.match(text, found.end)
            place = end if separator is None else separator.end()
        return calls, end

    def after_closing(self, text: str, start: int, is_end: bool) -> int | None:
        """Returns the place after the closing that follows a call; None if something else follows.

        At the end of an answer, the closing may be incomplete, because the model may end the answer instead.
        """
        place = skip_space(text, start)
        if (found := self._closing.match(text, place)) is not None and (self.can_precede_text or is_end):
            place = found.end()
            return place if self.can_precede_text or not text[place:].strip() else None
        return len(text) if is_end and _squeezed(self.closing).startswith(_squeezed(text[place:])) else None

    def read_bare(self, text: str, schemas: Schemas) -> list[ToolCall] | None:
        """Returns the calls of an answer that consists of calls of known functions; None if it is something else."""
        place = skip_space(text, 0)
        starts = (
            re.compile(literal(one.strip())).match(text, place) for one in (*self.openings, self.bare_opening or "")
        )
        found = next((start for start in starts if start is not None), None)
        if found is None:
            return None
        calls, end = self.read(text, found.end(), schemas)
        rest = self._without_marks(_squeezed(text[end:])).rstrip(";")
        is_whole = self._without_marks(_squeezed(self.closing)).startswith(rest)
        return calls if is_whole and calls and all(call.name in schemas for call in calls) else None

    def _without_marks(self, text: str) -> str:
        for mark in self.marks:
            text = text.replace(mark, "")
        return text


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _begins(text: str, others: Iterable[str]) -> bool:
    """Returns whether a text is the beginning of another one, or begins with it, apart from white space."""
    begun = _squeezed(text)
    return any(other.startswith(begun) or begun.startswith(other) for other in filter(None, map(_squeezed, others)))


# gpt-oss writes calls in a different way from its chat template, and in several ways.
_HARMONY_STARTS = (
    "<|start|>assistant<|channel|>commentary to=functions.",
    "<|start|>assistant<|channel|>analysis to=functions.",
    "<|start|>assistant to=functions.",
    "<|channel|>commentary to=functions.",
    "<|channel|>analysis to=functions.",
    "to=functions.",
)
_HARMONY_MIDDLES = tuple(
    f"{channel} {constraint}<|message|>"
    for channel in ("<|channel|>commentary", "<|channel|>analysis", "")
    for constraint in ("<|constrain|>json", "json", "")
)


def infer_form(one: str, two: str | None, empty: str | None, known: ToolCall) -> CallForm | None:
    """Returns the form in which a chat template has written a known call; None if its syntax is unknown.

    `one` is the text of the call, `two` that of two such calls, and `empty` that of a call without arguments.
    """
    found = infer_syntax(one, known)
    if found is None:
        return None
    syntax, start, end = found
    opening, closing, separator = one[:start], one[end:], ""
    if two is not None and two.startswith(one[:end]):
        again = infer_syntax(two[end:], known)
        separator = "" if again is None else two[end : end + again.start]
    if isinstance(syntax, MarkedValues):
        begun = None if empty is None or not empty.startswith(one[:start] + known.name) else empty
        after_name = None if begun is None else begun[start + len(known.name) :]
        syntax, closing, separator = syntax.with_ends(closing, after_name, separator)
    opening = opening.rpartition(THOUGHT_END)[2]
    if isinstance(syntax, NamedJson) and opening.endswith("to=functions.") and "<|message|>" in syntax.between[0]:
        return CallForm(NamedJson(_HARMONY_MIDDLES), _HARMONY_STARTS, separator, closing)
    return CallForm(syntax, (opening,), separator, closing)


def with_marks(form: CallForm, special_texts: Collection[str]) -> CallForm:
    """Returns a form with the special tokens that occur in it as its marks."""
    syntax = "".join(str(part) for part in vars(form.syntax).values())
    texts = "".join([*form.openings, form.separator, form.closing, syntax])
    return replace(form, marks=frozenset(text for text in special_texts if text and text in texts))
